"""What keeps the pace of running requests: how much prefill a step may carry, and how many requests may run. No torch.

Both follow from predicted seconds of a step; without a prediction nothing is held back.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

# A step with prefill takes at most so many times as long as the same step without it. Small chunks are dear: at 2 a
# batch of 16 short answers took a fifth longer on two cores, for most prompts were read in chunks of 20 tokens.
# Far above 4 a reader sees the text stop whenever somebody else's prompt arrives.
MAX_SLOWDOWN = 4.0
# Prefill goes on with at least so many tokens a step whatever the pace: one tile of a matrix product, and no prompt
# starves where even a small chunk is slow.
MIN_PREFILL_TOKENS = 16
VERIFIED_RATE = 0.1  # of the running mean of verified tokens: it forgets within a few dozen steps

StepSeconds = Callable[[int, float], float]  # tokens of a step, mean tokens before one of them -> seconds of the step
Span = tuple[int, int]  # tokens of one request: where they start, how many they are


@dataclass(frozen=True)
class StepSize:
    """How many tokens a step holds, and how much text stands before them."""

    num_tokens: int = 0
    context_sum: int = 0  # tokens before each token, added up

    def plus(self, spans: Iterable[Span], max_tokens: int | None = None) -> StepSize:
        """Return the size with these spans added, in order, and no more than `max_tokens` of them."""
        left = sys.maxsize if max_tokens is None else max_tokens
        context_sum, num_left = self.context_sum, left
        for start, wanted in spans:
            taken = min(wanted, num_left)
            context_sum += taken * start + taken * (taken - 1) // 2
            num_left -= taken
        return StepSize(self.num_tokens + left - num_left, context_sum)

    @property
    def context_len(self) -> float:
        """Mean tokens before a token of the step; 0 for an empty one."""
        return self.context_sum / self.num_tokens if self.num_tokens else 0.0


class Pace:
    """Bounds prefill and admission by the predicted time of a step."""

    def __init__(
        self,
        step_s: StepSeconds | None,
        *,
        tokens_per_step: Callable[[], float],
        target_tpot_s: float | None = None,
    ) -> None:
        assert target_tpot_s is None or step_s is not None, "a target time per token needs predicted step times"
        self._step_s = step_s
        self._tokens_per_step = tokens_per_step
        self._target_tpot_s = target_tpot_s
        self._verified_per_request = 0.0  # running mean of drafted tokens that a request verifies a step

    def observe(self, num_decoding: int, num_verified: int) -> None:
        """Take how many drafted tokens a step verifies for its decoding requests, of which there is at least one."""
        self._verified_per_request += VERIFIED_RATE * (num_verified / num_decoding - self._verified_per_request)

    def max_prefill_tokens(self, anchors: StepSize, chunks: Sequence[Span], room: int) -> int:
        """Return how many of `room` prefill tokens the step may take beside these anchors.

        `chunks` are all tokens still to be prefilled, in the order in which they get their turn. Drafts are left out on
        both sides: how many are verified is decided later and depends on the prefill, and beside the same drafts the
        slowdown is no larger.
        """
        if self._step_s is None or anchors.num_tokens == 0 or room <= MIN_PREFILL_TOKENS:
            return room
        limit_s = MAX_SLOWDOWN * self._step_s(anchors.num_tokens, anchors.context_len)
        if self._target_tpot_s is not None:
            limit_s = min(limit_s, self._target_tpot_s * self._tokens_of_a_step())

        def seconds(num_prefill_tokens: int) -> float:
            assert self._step_s is not None
            size = anchors.plus(chunks, num_prefill_tokens)
            return self._step_s(size.num_tokens, size.context_len)

        more = range(MIN_PREFILL_TOKENS + 1, room + 1)
        return MIN_PREFILL_TOKENS + bisect_right(more, limit_s, key=seconds)

    def has_room_for(self, context_lens: Iterable[int]) -> bool:
        """Return whether requests with so many tokens each, one or more, would all keep the target time per token.

        Judged by what a step without prefill will hold once all of them decode. A request alone always may run.
        """
        lens = list(context_lens)
        if self._target_tpot_s is None or len(lens) == 1:
            return True
        assert self._step_s is not None
        tokens_gained = self._tokens_of_a_step()
        tokens_held = max(1.0 + self._verified_per_request, tokens_gained)  # before anything was verified, too
        step_s = self._step_s(round(len(lens) * tokens_held), sum(lens) / len(lens))
        return step_s <= self._target_tpot_s * tokens_gained

    def _tokens_of_a_step(self) -> float:
        return max(1.0, self._tokens_per_step())  # a decoding request gets one in any case; nothing observed reads 0
