"""What a request asks to change in the target's logits before anything is drawn: penalties, biases, bans, structure.

The penalties follow the drafted path: a row sees the counts of the committed text and of the drafted tokens before it,
and nothing of a draft outlives the call. R rows of logits, V vocabulary, U distinct tokens seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.request import BANNING_BIAS, SamplingParams
from dspark.speculation.structure_matching import StructureMatcher


class LogitProcessor:
    """The changes one request asks for, and the counts of its committed text.

    Order: repetition penalty (prompt and output), frequency and presence penalty (output alone), logit bias, then bans
    and the allowed tokens; of a bad sequence the last token is banned where the output ends with the ones before it.
    Then, where the answer has a structure, all that does not lead on in it is banned. All that is kept grows with the
    text, nothing but masks of a structure with the vocabulary.
    """

    def __init__(
        self, sampling: SamplingParams, *, prompt_token_ids: Sequence[int], structure: StructureMatcher | None = None
    ) -> None:
        assert (structure is None) == (sampling.structure is None), sampling.structure
        self.structure = structure
        self._sampling = sampling
        self._num_followed = self._num_prompt_tokens = len(prompt_token_ids)
        # Bad sequences by their last token but one: all but the last token, and the last.
        self._sequences: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for sequence in sampling.bad_token_sequences:
            if len(sequence) > 1:
                self._sequences.setdefault(sequence[-2], []).append((sequence[:-1], sequence[-1]))
        self._tail_len = max((len(s) - 1 for s in sampling.bad_token_sequences), default=0)
        self._tail: tuple[int, ...] = ()  # so many of the latest output tokens
        self._slots: dict[int, int] = {}  # token id -> index below
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)  # of the output
        if sampling.repetition_penalty != 1.0:
            for token_id in dict.fromkeys(prompt_token_ids):
                self._slot(token_id)
        self._fixed: _FixedChanges | None = None  # made in the thread that computes

    def follow(self, token_ids: Sequence[int]) -> None:
        """Count what was committed since the last call; `token_ids` is all of it, the prompt included."""
        if self._sampling.has_penalties:
            for token_id in token_ids[self._num_followed :]:
                slot = self._slot(token_id)  # may move the counts
                self._counts[slot] += 1.0
        if self.structure is not None:
            self.structure.follow(token_ids[self._num_followed :])
        self._num_followed = len(token_ids)
        if self._sequences:
            start = max(self._num_prompt_tokens, len(token_ids) - self._tail_len)
            self._tail = tuple(token_ids[start:])

    def apply_(self, logits: Tensor, drafted: Sequence[int]) -> None:
        """Change the logits [R, V] float32 of the last R positions of the path: committed text, then `drafted`.

        The last row follows all of `drafted`, the one before it all but the last token, and so on.
        """
        assert 1 <= logits.shape[0] <= len(drafted) + 1, (logits.shape, len(drafted))
        if self._sampling.has_penalties:
            self._penalise_(logits, drafted)
        if self._fixed is None or self._fixed.device != logits.device:
            self._fixed = _FixedChanges(self._sampling, logits.device)
        self._fixed.apply_(logits)
        if self._sequences:
            self._ban_sequences_(logits, drafted)
        if self.structure is not None:
            self.structure.mask_(logits, drafted)

    def _ban_sequences_(self, logits: Tensor, drafted: Sequence[int]) -> None:
        rows, banned = [], []
        for row in range(logits.shape[0]):
            path = self._tail + tuple(drafted[: len(drafted) + 1 - logits.shape[0] + row])
            for beginning, last in self._sequences.get(path[-1], ()) if path else ():
                if path[-len(beginning) :] == beginning:
                    rows.append(row)
                    banned.append(last)
        if rows:
            logits[torch.tensor(rows, device=logits.device), torch.tensor(banned, device=logits.device)] = -math.inf

    def _slot(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        return slot

    def _penalise_(self, logits: Tensor, drafted: Sequence[int]) -> None:
        ids, counts, is_seen = self._seen(drafted, logits.shape[0])
        if not len(ids):
            return
        sampling, device = self._sampling, logits.device
        columns = torch.from_numpy(ids).to(device)
        values = logits.index_select(1, columns)  # [R, U]
        penalty = sampling.repetition_penalty
        if penalty != 1.0:
            repeated = torch.where(values > 0.0, values / penalty, values * penalty)
            values = torch.where(torch.from_numpy(is_seen).to(device), repeated, values)
        if sampling.frequency_penalty or sampling.presence_penalty:
            loss = np.float32(sampling.frequency_penalty) * counts
            loss += np.float32(sampling.presence_penalty) * (counts > 0.0)
            values = values - torch.from_numpy(loss).to(device)
        logits.index_copy_(1, columns, values)

    def _seen(self, drafted: Sequence[int], num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids [U], output counts [R, U] float32 and whether each row has seen each id [R, U] bool."""
        num_known = len(self._slots)
        fresh: dict[int, int] = {}  # drafted tokens that the committed text lacks
        for token_id in drafted:
            if token_id not in self._slots:
                fresh.setdefault(token_id, num_known + len(fresh))
        ids = np.concatenate([self._ids[:num_known], np.fromiter(fresh, dtype=np.int64, count=len(fresh))])
        counts = np.zeros((num_rows, len(ids)), dtype=np.float32)
        counts[:, :num_known] = self._counts[:num_known]
        is_seen = np.zeros((num_rows, len(ids)), dtype=np.bool_)
        is_seen[:, :num_known] = True
        num_before = len(drafted) + 1 - num_rows  # drafted tokens that the first row follows
        for index, token_id in enumerate(drafted):
            slot = self._slots[token_id] if token_id in self._slots else fresh[token_id]
            first_row = max(0, index + 1 - num_before)
            counts[first_row:, slot] += 1.0
            is_seen[first_row:, slot] = True
        return ids, counts, is_seen


class _FixedChanges:
    """Those that do not depend on the text, as tensors."""

    def __init__(self, sampling: SamplingParams, device: torch.device) -> None:
        self.device = device
        biases = {i: bias for i, bias in sampling.logit_bias.items() if bias != BANNING_BIAS}
        self._biased = torch.tensor(list(biases), dtype=torch.int64, device=device)
        self._biases = torch.tensor(list(biases.values()), dtype=torch.float32, device=device)
        self._banned = torch.tensor(sorted(sampling.banned_token_ids), dtype=torch.int64, device=device)
        allowed = sampling.allowed_token_ids
        self._allowed = None if allowed is None else torch.tensor(sorted(set(allowed)), device=device)

    def apply_(self, logits: Tensor) -> None:
        if len(self._biased):
            logits.index_copy_(1, self._biased, logits.index_select(1, self._biased) + self._biases)
        if len(self._banned):
            logits.index_fill_(1, self._banned, -math.inf)
        if self._allowed is not None:
            kept = logits.index_select(1, self._allowed)
            logits.fill_(-math.inf)
            logits.index_copy_(1, self._allowed, kept)


def logit_processor(
    sampling: SamplingParams, *, prompt_token_ids: Sequence[int], structure: StructureMatcher | None = None
) -> LogitProcessor | None:
    """Return the processor of a request, or None for one that leaves the logits as they are.

    `structure` follows the answer of a request that asks for one.
    """
    if not sampling.changes_logits:
        return None
    return LogitProcessor(sampling, prompt_token_ids=prompt_token_ids, structure=structure)
