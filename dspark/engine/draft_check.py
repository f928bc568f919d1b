"""What the engine checks of drafts before it verifies them: proposers may be faulty, verification may not."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch

from dspark.speculation.proposal import Draft, DraftContext


def check_drafts(drafts: Sequence[Draft], contexts: Sequence[DraftContext], vocab_size: int) -> None:
    """Raise `ValueError` when a proposer returned what scheduling and verification must not see."""
    if len(drafts) != len(contexts):
        raise ValueError(f"{len(drafts)} drafts for {len(contexts)} requests")
    for draft, context in zip(drafts, contexts, strict=True):
        if len(draft.token_ids) > context.num_draft_tokens:
            raise ValueError(f"{len(draft.token_ids)} tokens drafted, {context.num_draft_tokens} allowed")
        if not all(isinstance(token_id, Integral) and 0 <= token_id < vocab_size for token_id in draft.token_ids):
            raise ValueError(f"drafted ids {draft.token_ids} leave the vocabulary of {vocab_size}")
        if draft.probs is not None:
            wanted = (len(draft.token_ids), vocab_size)
            if draft.probs.shape != wanted or draft.probs.dtype != torch.float32:
                raise ValueError(f"probs are {draft.probs.dtype} {tuple(draft.probs.shape)}, not float32 {wanted}")
            drawn = draft.probs[range(len(draft.token_ids)), draft.token_ids]
            if not bool((drawn > 0.0).all()):  # also for NaN
                raise ValueError(f"drafted ids {draft.token_ids} have probabilities {drawn.tolist()}")
        if draft.confidences is not None:
            _check_confidences(draft, context)


def _check_confidences(draft: Draft, context: DraftContext) -> None:
    assert draft.confidences is not None
    if len(draft.confidences) != len(draft.token_ids):
        raise ValueError(
            f"request {context.request_id}: {len(draft.confidences)} confidences for {len(draft.token_ids)} tokens"
        )
    for k, confidence in enumerate(draft.confidences, start=1):
        if not 0.0 <= confidence <= 1.0:  # also for NaN
            raise ValueError(f"request {context.request_id}: confidence {k} is {confidence}, not a probability")
