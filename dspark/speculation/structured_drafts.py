"""Cuts drafts where their request's structure forbids to go on, before any row of the target is spent on that."""

from __future__ import annotations

from dspark.speculation.proposal import Draft, DraftContext


def within_structure(draft: Draft, context: DraftContext) -> Draft:
    """Return the part of a draft that the target's answer to it depends on.

    Behind a token that completes the structure nothing comes. A forbidden token is dropped with all that follows, but
    not where it was drawn from the drafter's distribution for a rule that judges by it (`rejection`, `block`): there
    it is the last one kept. Dropping it would be a choice by its value: the target would draw what takes its place
    from its whole distribution, not from what the drafter's leaves of it.
    """
    processor = context.logit_processor
    if processor is None or processor.structure is None or not draft.token_ids:
        return draft
    structure = processor.structure
    length = structure.num_allowed(draft.token_ids)
    is_judged_by_value = draft.probs is not None and not context.is_coupled and not context.sampling.is_greedy
    if is_judged_by_value and not structure.is_complete(draft.token_ids[:length]):
        length += 1
    return draft.prefix(length)
