"""Rounds of a drafter along texts of its target, as serving would make them, each judged in full.

Confidences are looked at along *drafted* tokens, also behind a rejected one, for that is what a scheduler sees.
A anchors of an answer, n of them at a time, K proposals, B slots, D hidden, F inputs of the confidence head, V target
ids, Vd draft ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.drafter_module import DrafterModule
from dspark.models.heads import SequentialHead
from dspark.training.blocks import build_blocks
from dspark.training.dataset import Conversation
from dspark.training.features import Features, FeatureSource, check_delivered
from dspark.training.loss import TargetLogits
from dspark.training.simulated_rounds import GREEDY, NEAR_TIE, SAMPLED, answer_spans, kind_of

_ANCHORS_PER_CHUNK = 32


@dataclass(frozen=True, kw_only=True)
class JudgedDrafts:
    """A draft at each anchor of an answer that all K proposals fit behind."""

    confidence_logits: np.ndarray  # [A, K]
    # [A, K] given what was drawn before k: 0 behind a rejection, else how likely proposal k was to be accepted, exactly
    acceptance: np.ndarray
    num_accepted: np.ndarray  # [A]
    head_inputs: np.ndarray | None  # [A, K, F] float32 what the confidence head read; None: not asked for
    is_argmax: bool  # the text is what the target says greedily, from its second token on

    def at(self, anchors: Sequence[int]) -> JudgedDrafts:
        """Return the drafts at some of the anchors, by index."""
        chosen = list(anchors)
        return replace(
            self,
            confidence_logits=self.confidence_logits[chosen],
            acceptance=self.acceptance[chosen],
            num_accepted=self.num_accepted[chosen],
            head_inputs=None if self.head_inputs is None else self.head_inputs[chosen],
        )


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The rounds that serving made along some texts, each judged in full."""

    confidence_logits: np.ndarray  # [N, K]
    acceptance: np.ndarray  # [N, K] as in `JudgedDrafts`
    num_accepted: np.ndarray  # [N]
    head_inputs: np.ndarray | None  # [N, K, F]
    text_ids: np.ndarray  # [N]


def collect_rounds(
    module: DrafterModule,
    conversations: Sequence[Conversation],
    features: FeatureSource,
    target_logits: TargetLogits,
    *,
    kinds: Sequence[str] = (GREEDY, SAMPLED),
    seed: int = 0,
    keeps_inputs: bool = False,  # of the confidence head
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rounds:
    """Return the rounds of serving the texts of these `kinds`: greedy ones at temperature 0, others at temperature 1.

    Texts of an unknown temperature count as greedy where every token is the target's argmax, else they are left out.
    At temperature 1 drafts are drawn and judged as `rejection` does, with draws keyed by seed and text.
    """
    head = SequentialHead(module.config, module.state_dict())
    num_proposals = module.config.num_draft_tokens
    parts: list[tuple[JudgedDrafts, int]] = []  # drafts of the rounds, and their text
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
                is_greedy=kind == GREEDY, seed=(seed, text_id, span[0]), keeps_inputs=keeps_inputs,
            )
            for span in spans
        ]  # fmt: skip
        if conversation.temperature is None and not all(one.is_argmax for one in drafts):
            continue
        parts += [(one.at(visited_anchors(one.num_accepted)), text_id) for one in drafts]
    progress(len(conversations), len(conversations))
    none = np.empty((0, num_proposals))
    inputs = [one.head_inputs for one, _ in parts if one.head_inputs is not None]
    return Rounds(
        confidence_logits=np.concatenate([none, *(one.confidence_logits for one, _ in parts)]),
        acceptance=np.concatenate([none, *(one.acceptance for one, _ in parts)]),
        num_accepted=np.concatenate([none[:, 0].astype(int), *(one.num_accepted for one, _ in parts)]),
        head_inputs=np.concatenate(inputs) if inputs else None,
        text_ids=np.repeat([text_id for _, text_id in parts], [len(one.num_accepted) for one, _ in parts]),
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
    keeps_inputs: bool = False,  # of the confidence head
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
        drafting = _Drafting(
            module, head, text, logits, is_greedy=is_greedy, generator=generator, keeps_inputs=keeps_inputs
        )
        parts.append(drafting.run(hidden[part], batch.anchor_token_ids[part]))
    confidence, acceptance, num_accepted, inputs = (
        torch.cat(tensors).cpu().numpy() for tensors in zip(*parts, strict=True)
    )
    if np.isnan(confidence).any():
        raise CheckpointError("the drafter's confidences on these texts are not numbers; use another drafter")
    return JudgedDrafts(
        confidence_logits=confidence, acceptance=acceptance, num_accepted=num_accepted,
        head_inputs=inputs if keeps_inputs else None, is_argmax=is_argmax,
    )  # fmt: skip


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
        keeps_inputs: bool,
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
        self._keeps_inputs = keeps_inputs

    def run(self, hidden: Tensor, anchor_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return confidence logits and acceptance [n, K] float64, accepted counts [n], and the head's inputs.

        Of blocks [n, B, D]; inputs [n, K, F], with F = 0 unless they are kept.
        """
        config, num_rows = self._module.config, len(anchor_ids)
        steps = self._head.begin(hidden, anchor_ids)
        previous, is_alive = anchor_ids, torch.ones_like(anchor_ids, dtype=torch.bool)
        confidences, acceptances, inputs = [], [], []
        num_accepted = torch.zeros_like(anchor_ids)
        for k in range(config.num_draft_tokens):
            bias, confidence = steps.step(previous)
            assert confidence is not None, "the drafter has a confidence head"
            slot = hidden[:, config.first_proposal_slot + k]
            inputs.append(self._head_inputs(slot, previous))
            logits = self._module.base_logits(slot).float()
            logits = (logits if bias is None else logits + bias)[:, : self._num_draft_ids]
            previous, chance, is_accepted = self._propose(logits, slice(k, k + num_rows), is_alive)
            confidences.append(confidence.double())
            acceptances.append(is_alive * chance.double())
            is_alive = is_alive & is_accepted
            num_accepted += is_alive
        return torch.stack(confidences, 1), torch.stack(acceptances, 1), num_accepted, torch.stack(inputs, 1)

    def _head_inputs(self, slot: Tensor, previous: Tensor) -> Tensor:
        """Return what the confidence head reads at hidden states [n, D] behind the tokens `previous` [n] (Eq. 7)."""
        if not self._keeps_inputs:
            return slot[:, :0]
        if not self._module.config.confidence_uses_markov:
            return slot.float()
        assert self._head.w1 is not None, "a head that reads W1"
        return torch.cat([slot, F.embedding(previous, self._head.w1)], dim=-1).float()

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


def _num_anchors(span: tuple[int, int], num_proposals: int) -> int:
    """Return how many anchors of the answer at `span` have `num_proposals` of its tokens after them."""
    return max(span[1] - span[0] - num_proposals, 0)
