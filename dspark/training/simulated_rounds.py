"""Offline simulation of served rounds: which anchors serving would visit along a text, and what it would accept there.

Anchors that rounds visit are not spread evenly (a round starts where the last one stumbled), so averages over random
anchors are not what serving counts. A anchors of an answer, K proposals, S supervised slots, V target ids.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.models.drafter_module import BlockFeatures, DrafterModule
from dspark.speculation.round_counts import RoundCounts
from dspark.training.block_pass import draft_logits, run_blocks
from dspark.training.blocks import BlockBatch, build_blocks
from dspark.training.checkpoint import TrainedModule
from dspark.training.dataset import Conversation
from dspark.training.features import FeatureSource, check_delivered
from dspark.training.loss import TargetLogits

# The temperatures whose rounds are simulated, as they are named in results.
GREEDY, SAMPLED = "0", "1"
# Data may come from the same weights in another type: logits this close are a tie that may fall either way.
NEAR_TIE = 0.1
_SLOTS_PER_CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class TextAcceptance:
    """Chances that the proposals of each anchor of an answer are accepted, given the text; 0 behind its end."""

    greedy: np.ndarray  # [A, K] 1 where the draft's argmax is the text's token
    sampled: np.ndarray  # [A, K] at temperature 1
    is_argmax: bool  # the text is what the target says greedily, from its second token on


def simulate_rounds(
    module: TrainedModule,
    conversations: Sequence[Conversation],
    features: FeatureSource,
    target_logits: TargetLogits,
    *,
    num_texts: int,
    eos_token_ids: Collection[int] = (),
) -> dict[str, RoundCounts]:
    """Simulate serving along the target's own texts at temperatures 0 and 1; return the counts by temperature.

    Greedy rounds run along at most `num_texts` conversations of temperature 0 (or of an unknown one, where every token
    is the target's argmax), sampled rounds along as many of temperature 1. Counts of a greedy text are those of
    serving it; those of a sampled text are their exact expectation over the drafts that could have been drawn, under
    `rejection` verification (of a text drawn without top-k, as serving at temperature 1 is measured). Each answer of a
    conversation is a text.
    """
    counts = {GREEDY: RoundCounts(), SAMPLED: RoundCounts()}
    num_left = dict.fromkeys(counts, num_texts)
    for conversation in conversations:
        kind = kind_of(conversation)
        if kind is None or not num_left[kind]:
            continue
        answers = [
            (span, acceptance_along(module, conversation, span, features, target_logits))
            for span in answer_spans(conversation)
        ]
        if conversation.temperature is None and not all(acceptance.is_argmax for _, acceptance in answers):
            continue
        num_left[kind] -= 1
        for (_, end), acceptance in answers:
            table = acceptance.greedy if kind == GREEDY else acceptance.sampled
            is_ended = int(conversation.token_ids[end - 1]) in eos_token_ids
            counts[kind] = counts[kind].plus(expected_rounds(table, is_ended=is_ended))
    return counts


def expected_rounds(acceptance: np.ndarray, *, is_ended: bool) -> RoundCounts:
    """Return the expected counts of serving one text whose proposals are accepted with chances `acceptance` [A, K].

    The text's first token comes from the prefill, and each of its tokens but the last is an anchor; proposal k of
    anchor n stands k + 1 tokens after it. A round that accepts j proposals moves on by j + 1 tokens, so the chance
    that a round starts at an anchor follows from those before it. `is_ended`: an end token ended the text, not a
    limit (which drafts are cut short for).
    """
    num_anchors, num_proposals = acceptance.shape
    rows: list[list[float]] = acceptance.tolist()
    visits = [1.0] + [0.0] * (num_anchors + num_proposals)
    counts = RoundCounts(num_texts=1, num_emitted=num_anchors)
    counts.cover(num_proposals)
    for anchor, chances in enumerate(rows):
        chance = visits[anchor]
        counts.num_rounds += chance
        num_left = num_anchors - anchor
        # A round emits one token more than it accepts: the engine drafts none for the last one left.
        length = min(num_proposals, num_left if is_ended else num_left - 1)
        for k in range(length):
            counts.reached[k] += chance
            survived = chance * chances[k]
            counts.accepted[k] += survived
            visits[anchor + k + 1] += chance - survived
            chance = survived
        visits[anchor + length + 1] += chance
    return counts


def acceptance_along(
    module: TrainedModule,
    conversation: Conversation,
    span: tuple[int, int],
    features: FeatureSource,
    target_logits: TargetLogits,
) -> TextAcceptance:
    """Return the acceptance at each anchor of the answer at positions `span` (the end is not in it)."""
    config = module.config
    start, end = span
    anchors = np.arange(start, end - 1)
    tables = [np.zeros((len(anchors), config.num_draft_tokens)) for _ in range(2)]
    if not len(anchors):  # a single token, which the prefill gave
        return TextAcceptance(greedy=tables[0], sampled=tables[1], is_argmax=True)
    delivered = features([conversation])
    check_delivered(delivered, needs_target_probs=True)
    batch = build_blocks([conversation], delivered, [anchors], config, device=module.lm_head.weight.device)
    is_argmax = True
    with torch.no_grad():
        for at, slots in _slots(module, run_blocks(module, batch), batch, target_logits):
            proposals = at[1] - config.first_proposal_slot
            inside = anchors[at[0]] + 1 + proposals < end  # slots may reach into the next answer
            for table, values in zip(tables, (slots.is_match, slots.sampled), strict=True):
                table[at[0][inside], proposals[inside]] = values[inside]
            is_argmax &= bool(slots.is_argmax[inside].all())
    return TextAcceptance(greedy=tables[0], sampled=tables[1], is_argmax=is_argmax)


def answer_spans(conversation: Conversation) -> list[tuple[int, int]]:
    """Return [start, end) of each run of tokens that the target wrote."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], conversation.is_supervised, [False]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


@dataclass(frozen=True, kw_only=True)
class _Slots:
    is_match: np.ndarray  # [s] bool
    sampled: np.ndarray  # [s]
    is_argmax: np.ndarray  # [s] bool, the label is the target's argmax or nearly so


def _slots(
    module: TrainedModule, blocks: BlockFeatures, batch: BlockBatch, target_logits: TargetLogits
) -> Iterator[tuple[tuple[np.ndarray, np.ndarray], _Slots]]:
    """Yield (block [s], slot [s]) of supervised slots with what is known of them."""
    kept_ids = module.target_ids
    draft_ids = torch.arange(module.config.vocab_size, device=batch.labels.device)  # [V] -1: cannot be proposed
    if kept_ids is not None:
        draft_ids.fill_(-1)
        draft_ids[kept_ids] = torch.arange(len(kept_ids), device=draft_ids.device)
    assert batch.final_hidden is not None, "checked by `check_delivered`"
    places = batch.is_supervised.nonzero()  # [S, 2]
    for part in places.split(_SLOTS_PER_CHUNK):
        at = (part[:, 0], part[:, 1])
        labels = batch.labels[at]
        proposed = draft_logits(module, blocks, at)
        is_match = _gathered(proposed, draft_ids[labels]) == proposed.amax(-1)
        rows, inverse = batch.target_rows[at].unique(return_inverse=True)
        logits = target_logits(batch.final_hidden[rows])[inverse]
        is_argmax = logits.amax(-1) - logits.gather(1, labels[:, None])[:, 0] <= NEAR_TIE
        if isinstance(module, DrafterModule) and module.config.markov_rank == 0:
            # Served as its argmax (a deterministic draft): the token that comes out was accepted if it is the draft's.
            sampled = is_match.double()
        else:
            # Given the token t that came out, its proposal was accepted with chance min(1, draft(t) / target(t)).
            log_ratio = _gathered(proposed.log_softmax(-1), draft_ids[labels]) - logits.log_softmax(-1).gather(
                1, labels[:, None]
            ).squeeze(1)
            sampled = log_ratio.double().clamp(max=0).exp()
        yield (
            (at[0].cpu().numpy(), at[1].cpu().numpy()),
            _Slots(is_match=is_match.cpu().numpy(), sampled=sampled.cpu().numpy(), is_argmax=is_argmax.cpu().numpy()),
        )


def _gathered(values: Tensor, ids: Tensor) -> Tensor:
    """Return the entry of each row [s, Vd] at its id [s]; -inf for an id below 0."""
    picked = values.gather(1, ids.clamp(min=0)[:, None])[:, 0]
    return picked.masked_fill(ids < 0, -torch.inf)


def kind_of(conversation: Conversation) -> str | None:
    """Return the temperature at which rounds along a conversation can be simulated; a greedy one is still to check."""
    if conversation.temperature is None or conversation.temperature == 0:
        return GREEDY
    return SAMPLED if conversation.temperature == 1 else None
