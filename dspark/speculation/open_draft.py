"""Drafts while they are made: each step draws one proposal per request, from the vector that is judged later.

Legend: M drafts, V target vocabulary, Vd ids the drafter's head has, k length of a draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from dspark.speculation.noise import KeyedNoise, NoisePurpose
from dspark.speculation.proposal import NO_DRAFT, Draft, DraftContext
from dspark.speculation.sampling import INVALID_TOKEN, greedy_tokens, race, sample_tokens, target_probs


@dataclass(kw_only=True)
class OpenDraft:
    """The draft of one request while it is made."""

    context: DraftContext
    length: int  # tokens to propose
    token_ids: list[int] = field(default_factory=list)  # target ids
    probs: list[Tensor] = field(default_factory=list)  # each [V]; stays empty for deterministic proposals

    @property
    def is_complete(self) -> bool:
        return len(self.token_ids) == self.length

    @property
    def last_token_id(self) -> int:
        """The latest proposal, or the anchor."""
        return self.token_ids[-1] if self.token_ids else self.context.token_ids[-1]

    @property
    def next_position(self) -> int:
        """The absolute position that the next proposal stands at."""
        return len(self.context.token_ids) + len(self.token_ids)

    def close(self) -> Draft:
        """Return what was proposed."""
        if not self.token_ids:
            return NO_DRAFT
        return Draft(token_ids=self.token_ids, probs=torch.stack(self.probs) if self.probs else None)


def draw_next(
    drafts: Sequence[OpenDraft],
    logits: Tensor,  # [M, Vd] float32
    *,
    vocab_size: int,  # V
    target_ids: Tensor | None = None,  # [Vd] int64, distinct ids below V; None: draft ids are target ids
    takes_argmax: bool = False,  # propose the argmax for sampled requests too, as a deterministic draft
) -> list[bool]:
    """Append one proposal to each draft; False, and nothing appended, where its logits are unusable.

    Greedy requests get the argmax, coupled ones the winner of a race under the target's own noise, the others a draw
    with the noise of proposals; before that the logits are changed as the request asks of the target's. Ids at or above
    V are never proposed. Synchronises once per kind of request, and once per coupled request.
    """
    assert logits.dtype == torch.float32 and len(drafts) == logits.shape[0], (logits.dtype, logits.shape, len(drafts))
    if target_ids is None:
        logits = logits[:, :vocab_size]  # padding rows of the head go before any argmax or softmax
    contexts = [draft.context for draft in drafts]
    if any(context.logit_processor is not None for context in contexts):
        logits = _processed(drafts, logits, vocab_size, target_ids)
    greedy = [i for i, c in enumerate(contexts) if c.sampling.is_greedy or (takes_argmax and not c.is_coupled)]
    sampled = sorted(set(range(len(drafts))) - set(greedy))
    drawn = [INVALID_TOKEN] * len(drafts)
    if greedy:
        for i, token_id in zip(greedy, _argmax(_rows(logits, greedy), target_ids), strict=True):
            drawn[i] = token_id
    if sampled:
        chosen = [drafts[i] for i in sampled]
        for i, token_id in zip(sampled, _sample(chosen, _rows(logits, sampled), vocab_size, target_ids), strict=True):
            drawn[i] = token_id
    for draft, token_id in zip(drafts, drawn, strict=True):
        if token_id != INVALID_TOKEN:
            assert 0 <= token_id < vocab_size, (token_id, vocab_size)
            draft.token_ids.append(token_id)
    return [token_id != INVALID_TOKEN for token_id in drawn]


def _processed(drafts: Sequence[OpenDraft], logits: Tensor, vocab_size: int, target_ids: Tensor | None) -> Tensor:
    """Return the logits with the changes that each request asks of the target's, for what it draws to be accepted.

    Where these leave no id that the drafter has, it draws as if there were none.
    """
    columns = torch.arange(logits.shape[1], device=logits.device) if target_ids is None else target_ids
    changed = logits.clone()
    for i, draft in enumerate(drafts):
        processor = draft.context.logit_processor
        if processor is not None:
            row = logits.new_full((1, vocab_size), -math.inf).index_copy_(1, columns, logits[i : i + 1])
            processor.apply_(row, draft.token_ids)
            row = row.index_select(1, columns)
            changed[i] = torch.where(row.amax().isfinite(), row[0], logits[i])
    return changed


def _rows(logits: Tensor, indices: list[int]) -> Tensor:
    return logits if len(indices) == logits.shape[0] else logits[indices]


def _argmax(logits: Tensor, target_ids: Tensor | None) -> list[int]:
    draft_ids = greedy_tokens(logits)
    if target_ids is None:
        return draft_ids
    to_target = target_ids.tolist()
    return [draft_id if draft_id == INVALID_TOKEN else to_target[draft_id] for draft_id in draft_ids]


def _sample(drafts: Sequence[OpenDraft], logits: Tensor, vocab_size: int, target_ids: Tensor | None) -> list[int]:
    """Draw one target id per draft from logits [M, Vd] and keep the vectors; `INVALID_TOKEN` where unusable."""
    probs, is_usable = target_probs(logits, [draft.context.sampling for draft in drafts])
    usable: list[bool] = is_usable.tolist()
    token_ids = [INVALID_TOKEN] * len(drafts)
    drawn = [i for i, draft in enumerate(drafts) if usable[i] and not draft.context.is_coupled]
    if drawn:
        # These vectors are drawn from here and judged by the verifier: one q, never computed twice.
        q = _over_target_ids(probs[drawn], vocab_size, target_ids)
        uniforms = [_proposal_uniform(drafts[i]) for i in drawn]
        for i, token_id, vector in zip(drawn, sample_tokens(q, uniforms), q, strict=True):
            token_ids[i] = token_id
            drafts[i].probs.append(vector)
    coupled = [i for i, draft in enumerate(drafts) if usable[i] and draft.context.is_coupled]
    if coupled:
        to_target = None if target_ids is None else target_ids.cpu().numpy()
        for i in coupled:
            noise, position = KeyedNoise(drafts[i].context.seed), drafts[i].next_position
            if to_target is None:
                token_ids[i] = race(probs[i], noise.exponential(position, logits.shape[1]))
            else:
                clocks = noise.exponential(position, vocab_size)[to_target]  # those of the same tokens as the target's
                token_ids[i] = int(to_target[race(probs[i], clocks)])
    return token_ids


def _over_target_ids(probs: Tensor, vocab_size: int, target_ids: Tensor | None) -> Tensor:
    """Return probabilities [M, Vd] over draft ids as [M, V] over target ids."""
    if target_ids is not None:
        return probs.new_zeros((probs.shape[0], vocab_size)).index_copy_(1, target_ids, probs)
    missing = vocab_size - probs.shape[1]
    return functional.pad(probs, (0, missing)) if missing > 0 else probs


def _proposal_uniform(draft: OpenDraft) -> float:
    return KeyedNoise(draft.context.seed).uniform(
        NoisePurpose.PROPOSAL, anchor_position=len(draft.context.token_ids) - 1, position=draft.next_position
    )
