"""Log-probabilities of prompts, from the passes that prefill them anyway, a bounded number of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dspark.engine.runner import TargetRunner
from dspark.engine.scheduler import ScheduledRow
from dspark.engine.sequence import Sequence as RequestSequence
from dspark.speculation.token_logprobs import token_logprobs
from dspark.speculation.verification import INVALID_LOGITS_ERROR

MAX_ROWS = 128  # of logits [MAX_ROWS, V] held at once: 25 MB for a vocabulary of 49,152


@torch.inference_mode()
def score_prompts(rows: Sequence[ScheduledRow], runner: TargetRunner) -> None:
    """Extend the prompt log-probabilities of all requests that want them by what this step computed of their prompts.

    `rows` are those that `runner` executed last, before their tokens count as computed. A request whose logits are not
    numbers gets an `error`. What was scored before a preemption stays. Synchronises.
    """
    wanted: list[tuple[RequestSequence, int, int]] = []  # position of what is scored, index of the token before it
    start = 0
    for row in rows:
        sequence = row.sequence
        if sequence.num_unscored:
            assert sequence.prompt_logprobs is not None
            first = 1 + len(sequence.prompt_logprobs)
            end = sequence.num_computed + row.num_tokens
            assert sequence.num_computed < first, (sequence.num_computed, first)
            wanted += [
                (sequence, position, start + position - 1 - sequence.num_computed)
                for position in range(first, min(end + 1, sequence.num_prompt_tokens))
            ]
        start += row.num_tokens + len(row.draft.token_ids)
    for begin in range(0, len(wanted), MAX_ROWS):
        block = wanted[begin : begin + MAX_ROWS]
        entries = token_logprobs(
            runner.logits_of([index for _, _, index in block]),
            [sequence.token_ids[position] for sequence, position, _ in block],
            [sequence.request.sampling.prompt_logprobs or 0 for sequence, _, _ in block],
            counts_ranks=True,
        )
        for (sequence, _, _), entry in zip(block, entries, strict=True):
            assert sequence.prompt_logprobs is not None
            sequence.prompt_logprobs.append(entry)
            if math.isnan(entry.logprob):
                sequence.error = INVALID_LOGITS_ERROR
