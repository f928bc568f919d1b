"""Rounds of a drafter along texts of its target, as serving would make them, and the calibration fitted to them.

Confidences are looked at along *drafted* tokens, also behind a rejected one, for that is what a scheduler sees.
A anchors of an answer, n of them at a time, K proposals, B slots, D hidden, V target ids, Vd draft ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dspark.durable_file import write_durably
from dspark.errors import CheckpointError, ConfigError
from dspark.models.device import open_device
from dspark.models.drafter_config import check_target
from dspark.models.drafter_module import DrafterModule
from dspark.models.heads import SequentialHead
from dspark.speculation.calibration import TEMPERATURES, Calibration, calibrate
from dspark.training.blocks import build_blocks
from dspark.training.checkpoint import load_module
from dspark.training.dataset import Conversation
from dspark.training.evaluate import chosen_conversations
from dspark.training.features import Features, FeatureSource, OnlineFeatures, check_delivered
from dspark.training.loss import TargetLogits
from dspark.training.setup import load_target
from dspark.training.simulated_rounds import GREEDY, NEAR_TIE, SAMPLED, answer_spans, kind_of

FEW_ROUNDS = 1000  # a calibration of fewer follows their chance
_ANCHORS_PER_CHUNK = 32
_KINDS = {0.0: GREEDY, 1.0: SAMPLED}


@dataclass(frozen=True, kw_only=True)
class JudgedDrafts:
    """A draft at each anchor of an answer that all K proposals fit behind."""

    confidence_logits: np.ndarray  # [A, K]
    # [A, K] given what was drawn before k: 0 behind a rejection, else how likely proposal k was to be accepted, exactly
    acceptance: np.ndarray
    num_accepted: np.ndarray  # [A]
    is_argmax: bool  # the text is what the target says greedily, from its second token on


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds that serving made along some texts, each judged in full."""

    confidence_logits: np.ndarray  # [N, K]
    acceptance: np.ndarray  # [N, K] as in `JudgedDrafts`
    text_ids: np.ndarray  # [N]


def calibrate_drafter(
    folder: Path,
    data: Sequence[str],
    *,
    target: str,
    held_out_only: float | None = None,  # the hold_out_fraction of the training run; None: all conversations
    temperatures: Sequence[float] = (0.0, 1.0),  # of the texts to use
    num_sequences: int | None = None,  # of each file; None: all
    max_length: int = 2048,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Fit the drafter in `folder` to rounds along the conversations in `data`; it should not have been trained on them.

    Raises `CheckpointError` for a drafter without a confidence head or of another target, `ConfigError` for wrong data.
    """
    kinds = _kinds_of(temperatures)
    if seed < 0:
        raise ConfigError(f"seed ({seed}) must not be negative; raise it")
    loaded = load_target(target, open_device(device))
    module = load_module(folder, loaded.decoder)
    if not isinstance(module, DrafterModule) or not module.config.has_confidence_head:
        raise CheckpointError(
            f"the drafter in {folder} has no confidence head, so there is nothing to calibrate; train one with it"
        )
    check_target(module.config, loaded.decoder.config, tokenizer_size=loaded.tokenizer.vocab_size)
    conversations: list[Conversation] = []
    for path in data:
        dataset = loaded.load_dataset([path], max_length=max_length, hold_out_fraction=held_out_only or 0.0)
        conversations += chosen_conversations(dataset, path, held_out_only)[:num_sequences]
    features = OnlineFeatures(loaded.decoder, module.config.tap_ids, chunk_tokens=512)
    rounds = collect_rounds(
        module, conversations, features, loaded.logits, kinds=kinds, seed=seed, progress=progress
    )  # fmt: skip
    if not len(rounds.acceptance):
        raise ConfigError(
            f"no text of temperature {' or '.join(kinds)} among {len(conversations)} conversations has an answer "
            f"longer than {module.config.num_draft_tokens} tokens, which a round takes; use other --temperatures, or "
            "more and longer texts of the target"
        )
    return calibrate(rounds.confidence_logits, rounds.acceptance, rounds.text_ids)


def collect_rounds(
    module: DrafterModule,
    conversations: Sequence[Conversation],
    features: FeatureSource,
    target_logits: TargetLogits,
    *,
    kinds: Sequence[str] = (GREEDY, SAMPLED),
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rounds:
    """Return the rounds of serving the texts of these `kinds`: greedy ones at temperature 0, others at temperature 1.

    Texts of an unknown temperature count as greedy where every token is the target's argmax, else they are left out.
    At temperature 1 drafts are drawn and judged as `rejection` does, with draws keyed by seed and text.
    """
    head = SequentialHead(module.config, module.state_dict())
    num_proposals = module.config.num_draft_tokens
    parts: list[tuple[np.ndarray, np.ndarray, int]] = [(np.empty((0, num_proposals)),) * 2 + (0,)]
    for text_id, conversation in enumerate(conversations):
        progress(text_id, len(conversations))
        kind = kind_of(conversation)
        spans = [span for span in answer_spans(conversation) if _num_anchors(span, num_proposals)]
        if kind not in kinds or not spans:
            continue
        delivered = features([conversation])
        check_delivered(delivered, needs_target_probs=True)
        drafts = [
            judge_drafts(
                module, head, conversation, span, delivered[0], target_logits,
                is_greedy=kind == GREEDY, seed=(seed, text_id, span[0]),
            )
            for span in spans
        ]  # fmt: skip
        if conversation.temperature is None and not all(one.is_argmax for one in drafts):
            continue
        for one in drafts:
            visited = visited_anchors(one.num_accepted)
            parts.append((one.confidence_logits[visited], one.acceptance[visited], text_id))
    progress(len(conversations), len(conversations))
    return Rounds(
        confidence_logits=np.concatenate([logits for logits, _, _ in parts]),
        acceptance=np.concatenate([acceptance for _, acceptance, _ in parts]),
        text_ids=np.repeat([text_id for _, _, text_id in parts], [len(logits) for logits, _, _ in parts]),
    )


def visited_anchors(num_accepted: np.ndarray) -> list[int]:
    """Return the anchors at which rounds start that accept `num_accepted` [A] there, and emit one token more."""
    visited, anchor = [], 0
    while anchor < len(num_accepted):
        visited.append(anchor)
        anchor += int(num_accepted[anchor]) + 1
    return visited


@torch.no_grad()
def judge_drafts(
    module: DrafterModule,
    head: SequentialHead,
    conversation: Conversation,
    span: tuple[int, int],
    features: Features,
    target_logits: TargetLogits,
    *,
    is_greedy: bool,
    seed: Sequence[int],
) -> JudgedDrafts:
    """Draft at each anchor of the answer at positions `span`, and judge the drafts by the text that followed."""
    config = module.config
    device = module.lm_head.weight.device
    anchors = np.arange(span[0], span[0] + _num_anchors(span, config.num_draft_tokens))
    batch = build_blocks([conversation], [features], [anchors], config, device=device)
    hidden = module.backbone(
        batch.context_features,
        batch.context_positions,
        batch.anchor_token_ids,
        batch.anchor_positions,
        batch.context_visible,
    )
    assert batch.final_hidden is not None, "checked by `collect_rounds`"
    token_ids = torch.from_numpy(conversation.token_ids).to(device)
    generator = torch.Generator(device).manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    is_argmax, parts = True, []
    for start in range(0, len(anchors), _ANCHORS_PER_CHUNK):
        part = slice(start, start + _ANCHORS_PER_CHUNK)
        first = int(anchors[start])
        # The rows that judge these anchors' proposals, each telling the token after it.
        rows = slice(first, first + len(anchors[part]) + config.num_draft_tokens - 1)
        text, logits = token_ids[rows.start + 1 : rows.stop + 1], target_logits(batch.final_hidden[rows])
        is_argmax &= bool((logits.amax(-1) - logits.gather(1, text[:, None])[:, 0] <= NEAR_TIE).all())
        drafting = _Drafting(module, head, text, logits, is_greedy=is_greedy, generator=generator)
        parts.append(drafting.run(hidden[part], batch.anchor_token_ids[part]))
    confidence, acceptance, num_accepted = (torch.cat(tensors).cpu().numpy() for tensors in zip(*parts, strict=True))
    if np.isnan(confidence).any():
        raise CheckpointError("the drafter's confidences on these texts are not numbers; use another drafter")
    return JudgedDrafts(
        confidence_logits=confidence, acceptance=acceptance, num_accepted=num_accepted, is_argmax=is_argmax
    )


class _Drafting:
    """Drafts at n neighbouring anchors, all together from left to right."""

    def __init__(
        self,
        module: DrafterModule,
        head: SequentialHead,
        text: Tensor,  # [n + K - 1] target ids: text[i + k] came out where anchor i has its proposal k
        target_logits: Tensor,  # [n + K - 1, V] that `text` was drawn from
        *,
        is_greedy: bool,
        generator: torch.Generator,
    ) -> None:
        self._module = module
        self._head = head
        # Rows that only the drafter's padded tables have stand for no token.
        self._num_draft_ids = min(module.config.draft_vocab_size, target_logits.shape[1])
        ids = module.target_ids
        self._target_ids = torch.arange(self._num_draft_ids, device=text.device) if ids is None else ids  # [Vd]
        self._text = text
        self._target_probs = target_logits.softmax(-1)
        self._is_greedy = is_greedy
        self._takes_argmax = is_greedy or module.config.markov_rank == 0  # as `DSparkProposer` does
        self._generator = generator

    def run(self, hidden: Tensor, anchor_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return confidence logits and acceptance [n, K] float64, and accepted counts [n], of blocks [n, B, D]."""
        config, num_rows = self._module.config, len(anchor_ids)
        steps = self._head.begin(hidden, anchor_ids)
        previous, is_alive = anchor_ids, torch.ones_like(anchor_ids, dtype=torch.bool)
        confidences, acceptances = [], []
        num_accepted = torch.zeros_like(anchor_ids)
        for k in range(config.num_draft_tokens):
            bias, confidence = steps.step(previous)
            assert confidence is not None, "checked by `calibrate_drafter`"
            logits = self._module.base_logits(hidden[:, config.first_proposal_slot + k]).float()
            logits = (logits if bias is None else logits + bias)[:, : self._num_draft_ids]
            previous, chance, is_accepted = self._propose(logits, slice(k, k + num_rows), is_alive)
            confidences.append(confidence.double())
            acceptances.append(is_alive * chance.double())
            is_alive = is_alive & is_accepted
            num_accepted += is_alive
        return torch.stack(confidences, 1), torch.stack(acceptances, 1), num_accepted

    def _propose(self, logits: Tensor, rows: slice, is_alive: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return proposals [n] (target ids), how likely each was to be accepted, and whether it was."""
        text = self._text[rows]
        target = self._target_probs[rows][:, self._target_ids]  # [n, Vd]
        if self._takes_argmax:
            drafted = logits.argmax(-1)
            token_ids = self._target_ids[drafted]
            is_accepted = token_ids == text
            chance = is_accepted.float() if self._is_greedy else target.gather(1, drafted[:, None])[:, 0]
            return token_ids, chance, is_accepted
        draft = logits.softmax(-1)
        is_text = self._target_ids == text[:, None]  # [n, Vd] no True where the text's token cannot be proposed
        drafted, is_accepted = draw_judged(draft, target, is_text, is_alive, self._generator)
        return self._target_ids[drafted], torch.minimum(draft, target).sum(-1), is_accepted


def draw_judged(
    draft: Tensor,  # [n, Vd] probabilities
    target: Tensor,  # [n, Vd] probabilities of the same ids
    is_text: Tensor,  # [n, Vd] bool: the one that came out, drawn from the target; none where it is outside of the Vd
    is_alive: Tensor,  # [n] bool: all earlier proposals were accepted
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Draw proposals [n] from `draft` jointly with whether `rejection` accepts each [n], given the text that came out.

    Given that t came out, its proposal was accepted (then it was t) with chance min(1, draft(t) / target(t)); else it
    follows what the draft has beyond the target. Over t this is a plain draw, accepted with min(1, target / draft).
    Behind a rejection the text is not the draft's continuation: a plain draw, and nothing is accepted.
    """
    text_draft, text_target = ((probs * is_text).sum(-1) for probs in (draft, target))
    ratio = text_draft / text_target.clamp(min=torch.finfo(target.dtype).tiny)
    coins = torch.rand(len(ratio), generator=generator, device=ratio.device)
    is_accepted = is_alive & (coins < ratio)
    excess = (draft - target).clamp(min=0)
    # Rounding can leave no excess where both are the same.
    is_rejected = is_alive & ~is_accepted & (excess.sum(-1) > 0)
    drawn = torch.multinomial(torch.where(is_rejected[:, None], excess, draft), 1, generator=generator)[:, 0]
    return torch.where(is_accepted, is_text.int().argmax(-1), drawn), is_accepted


def write_calibration(path: Path, content: Mapping[str, Any]) -> None:
    """Write or replace a calibration file: complete or not at all. Raises `CheckpointError` when it cannot be."""
    try:
        write_durably(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}; free space or name another --output") from error


def print_calibration(calibration: Calibration, console: Console) -> None:
    """Print temperatures and calibration errors by position, and what is doubtful about them."""
    table = Table(title=f"calibration of the survival c_1 .. c_k on {calibration.num_rounds} rounds")
    for column in ("position", "temperature", "ECE before", "ECE after", "cross-validated"):
        table.add_column(column, justify="right")
    columns = (calibration.temperatures, calibration.ece_before, calibration.ece_after)
    for k, (temperature, before, after) in enumerate(zip(*columns, strict=True)):
        checked = calibration.ece_cross_validated
        table.add_row(
            str(k + 1), f"{temperature:.2f}", f"{before:.3f}", f"{after:.3f}",
            "-" if checked is None else f"{checked[k]:.3f}",
        )  # fmt: skip
    console.print(table)
    if calibration.num_rounds < FEW_ROUNDS:
        console.print(f"{calibration.num_rounds} rounds are few: use at least {FEW_ROUNDS} for temperatures to trust")
    if {TEMPERATURES[0], TEMPERATURES[-1]} & set(calibration.temperatures):
        console.print(f"a temperature is at the end of the grid ({TEMPERATURES[0]} .. {TEMPERATURES[-1]})")


def _num_anchors(span: tuple[int, int], num_proposals: int) -> int:
    """Return how many anchors of the answer at `span` have `num_proposals` of its tokens after them."""
    return max(span[1] - span[0] - num_proposals, 0)


def _kinds_of(temperatures: Sequence[float]) -> list[str]:
    kinds = [_KINDS[t] for t in temperatures if t in _KINDS]
    if len(kinds) < max(len(temperatures), 1):
        raise ConfigError(
            f"temperatures ({', '.join(f'{t:g}' for t in temperatures)}) must be 0, 1 or both, at which rounds can be "
            "simulated; leave the others out"
        )
    return kinds
