"""What a scheduled row is to the target's pass, and to the verifier."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.batch import BatchRow
from dspark.engine.scheduler import ScheduledRow
from dspark.speculation.verification import VerificationRow


def sampled_rows(rows: Sequence[ScheduledRow]) -> list[ScheduledRow]:
    """Return the rows that end in a new token."""
    return [row for row in rows if row.is_sampled]


def batch_row(row: ScheduledRow) -> BatchRow:
    """Return the tokens to compute: those of the row, then its draft."""
    sequence = row.sequence
    start = sequence.num_computed
    return BatchRow(
        token_ids=sequence.token_ids[start : start + row.num_tokens] + row.draft.token_ids,
        start_position=start,
        page_ids=sequence.page_ids,
        num_logits=1 + len(row.draft.token_ids) if row.is_sampled else 0,
    )


def verification_row(row: ScheduledRow) -> VerificationRow:
    """Return what is needed to judge the draft and to draw the row's own token."""
    sequence = row.sequence
    return VerificationRow(
        draft=row.draft,
        sampling=sequence.request.sampling,
        seed=sequence.seed,
        method=sequence.verification,
        anchor_position=len(sequence.token_ids) - 1,
        min_tokens_left=max(0, sequence.request.sampling.min_tokens - sequence.num_output_tokens),
        masked_token_ids=sequence.masked_token_ids,
        logit_processor=sequence.logit_processor,
    )
