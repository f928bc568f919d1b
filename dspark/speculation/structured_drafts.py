"""Cuts drafts where their request's structure forbids to go on, before any row of the target is spent on that."""

from __future__ import annotations

from dataclasses import replace

from dspark.speculation.proposal import Draft, DraftContext


def within_structure(draft: Draft, context: DraftContext) -> Draft:
    """Return a draft of which nothing is verified that the structure keeps from coming out.

    That is what follows a token that completes it, and a forbidden token with all that follows. A token that was drawn
    from the drafter's distribution for a rule that judges by that (`rejection`, `block`) must not be dropped for its
    value, though: the target would draw what takes its place from its whole distribution, not from what the drafter's
    leaves of it. So there a forbidden token is the last one kept. And how many are verified must be chosen as if
    nothing was known of their values: such a draft keeps its length until then (`Draft.num_reachable`).
    """
    processor = context.logit_processor
    if processor is None or processor.structure is None:
        return draft
    structure = processor.structure
    num_allowed = structure.num_allowed(draft.token_ids)
    if num_allowed == len(draft.token_ids):
        return draft
    if draft.probs is None or context.is_coupled or context.sampling.is_greedy:
        return draft.prefix(num_allowed)
    is_complete = structure.is_complete(draft.token_ids[:num_allowed])
    return replace(draft, num_reachable=num_allowed if is_complete else num_allowed + 1)
