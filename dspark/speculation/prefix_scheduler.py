"""How many drafted tokens of each request a step verifies: the paper's prefix schedulers, as policy without torch.

A scheduler is lossless if whether x_k is verified does not depend on x_k. The survival a_{r,k} looks at x_1 .. x_{k-1}
alone, so a rule may use it for admitting x_k, but never for taking back an earlier token of the request.
Legend: R requests, K drafted tokens of the longest draft, B tokens of the step, a survival, l verified length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Protocol

import numpy as np

BUDGET_DELAY = 2  # steps between the confidences that set a budget and the step that spends it (Sec. 5.2)

# Survivals are rounded to so many steps where decisions must not hang on the last bits of a confidence: values that
# were meant to be equal then are, and go by position and request.
SURVIVAL_STEPS = 4096

StepSeconds = Callable[[np.ndarray], np.ndarray]  # [n] int64 tokens of a step -> [n] float64 seconds, each above 0


@dataclass(frozen=True, kw_only=True)
class DraftedStep:
    """What a scheduler may know of the next step: the drafts that wait for verification and what a pass costs.

    The objective is Theta = (R + sum of admitted a) / (seconds of B tokens + fixed_s), tokens per second of the whole
    step. It is the paper's tau * SPS(B) for the curve SPS(B) = 1 / (seconds + fixed_s). `fixed_s` is paid whatever the
    lengths, also for none; whether to draft at all is not a scheduler's question.
    """

    # [R][l] a_{r,1} >= a_{r,2} >= ..., each in [0, 1], for every request that gets a token from this step: also those
    # without a draft (an empty list) and those whose prefill ends. Cut to what a request may still verify.
    survivals: Sequence[Sequence[float]]
    num_other_tokens: int  # tokens of the step that are not drafts: anchors and prefill
    max_tokens: int  # the step holds at most this many, drafts included
    step_s: StepSeconds  # the target's pass
    fixed_s: float = 0.0  # the drafter's pass and what the engine does besides, per step

    @property
    def max_drafted(self) -> int:
        """Drafted tokens that the token budget has room for."""
        return max(0, self.max_tokens - self.num_other_tokens)


class PrefixScheduler(Protocol):
    """Chooses the verified lengths of a step."""

    def lengths(self, step: DraftedStep) -> list[int]:
        """Return l of each request [R], at most its draft's length; called once for every step that has requests."""
        ...


def survivals_of(confidences: Iterable[float]) -> list[float]:
    """Return a_1, a_2, .. = c_1, c_1 c_2, .. of conditional acceptance probabilities.

    A confidence above 1 counts as 1; one below 0 or NaN as 0, and so does all that follows it.
    """
    survival = 1.0
    products = []
    for confidence in confidences:
        # Not min/max: they would let NaN through in one order of arguments and drop it in the other.
        survival *= (1.0 if confidence > 1.0 else confidence) if confidence > 0.0 else 0.0
        products.append(survival)
    return products


class SurvivalTable(Sequence[list[float]]):
    """The survivals of many drafts as a table: `DraftedStep.survivals` for those who plan in every step."""

    def __init__(self, values: np.ndarray, draft_lens: np.ndarray, steps: np.ndarray | None = None) -> None:
        self.values = values  # [K, R] float64, 0 behind the end of a draft
        self.draft_lens = draft_lens  # [R] int64
        self.steps = steps  # [K, R] int16, the values in `SURVIVAL_STEPS` if they are rounded

    @classmethod
    def of(cls, survivals: Sequence[Sequence[float]]) -> SurvivalTable:
        """Return these survivals, which must be some."""
        if isinstance(survivals, cls):
            return survivals
        values, draft_lens = _padded(survivals)
        # Comparisons that NaN fails.
        is_falling = bool((values[1:] <= values[:-1]).all())
        is_probability = bool((values[:1] <= 1.0).all() and (values[-1:] >= 0.0).all())
        assert is_falling and is_probability, f"survivals must fall along each draft and lie in [0, 1]: {survivals}"
        return cls(values, draft_lens)

    @classmethod
    def rounded(cls, confidences: Sequence[Sequence[float]]) -> SurvivalTable:
        """Return `survivals_of` each draft's confidences, rounded to `SURVIVAL_STEPS`."""
        values, draft_lens = _padded(confidences)
        values = np.where(values > 0.0, np.minimum(values, 1.0), 0.0)
        steps = np.rint(np.cumprod(values, axis=0) * SURVIVAL_STEPS).astype(np.int16)
        return cls(steps / SURVIVAL_STEPS, draft_lens, steps)

    def __len__(self) -> int:
        return len(self.draft_lens)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.values[: self.draft_lens[index], index].tolist()


def _padded(drafts: Sequence[Sequence[float]]) -> tuple[np.ndarray, np.ndarray]:
    """Return one column for each draft [K, R] with zeros behind its end, and the drafts' lengths [R]."""
    lens = list(map(len, drafts))
    num_positions = max(lens, default=0)
    values = np.fromiter(
        chain.from_iterable(zip_longest(*drafts, fillvalue=0.0)), np.float64, num_positions * len(drafts)
    )
    return values.reshape(num_positions, len(drafts)), np.array(lens, dtype=np.int64)


def throughput(step: DraftedStep, lengths: Sequence[int]) -> float:
    """Return Theta of these lengths: expected tokens per second of the step, bonus tokens included."""
    num_tokens = step.num_other_tokens + sum(lengths)
    expected = len(step.survivals) + sum(sum(a[:length]) for a, length in zip(step.survivals, lengths, strict=True))
    return expected / (float(step.step_s(np.array([num_tokens]))[0]) + step.fixed_s)


@dataclass(frozen=True)
class EarlyStopScheduler:
    """Algorithm 1: admits tokens by descending survival and stops for good at the first that does not raise Theta.

    Lossless because it is a sequential rule: the next candidate and the test of it use the survivals of tokens up to
    that candidate, all known before it is drawn, in whichever request. Nothing is taken back.
    """

    def lengths(self, step: DraftedStep) -> list[int]:
        """See `PrefixScheduler`. A gain of exactly nothing stops too."""
        ranked = _ranked(step.survivals)
        theta = _theta(step, ranked.survivals[: step.max_drafted])
        is_gain = theta[1:] > theta[:-1]  # up to the stop, the best Theta so far is the one before
        return ranked.lengths(len(is_gain) if is_gain.all() else int(is_gain.argmin()))


@dataclass(frozen=True)
class ForesightScheduler:
    """Algorithm 1 for jagged step times: where it would stop, it looks whether going on is likely to pay after all.

    It supposes that each draft goes on as it went so far: a request whose next token survives with a_k has a_k^(j/k)
    at position j. If the best Theta that this promises is higher than the present one, so many more tokens are
    admitted, the likeliest first, and the search goes on from there. Lossless because the promise is made of survivals
    that look at admitted tokens only, and nothing is taken back. Unlike a delayed budget it follows the drafts of now,
    which counts most with few requests. A draft's length must not depend on its drawn tokens.
    """

    def lengths(self, step: DraftedStep) -> list[int]:
        """See `PrefixScheduler`."""
        ranked = _ranked(step.survivals)
        num_drafted = min(sum(map(len, step.survivals)), step.max_drafted)  # more than can be accepted: some are 0
        seconds = _seconds(step, num_drafted)
        tokens = _tokens(step, ranked.survivals[:num_drafted])
        theta = tokens / seconds[: len(tokens)]
        is_gain = theta[1:] > theta[:-1]
        num_admitted = 0
        while num_admitted < len(is_gain):
            if is_gain[num_admitted]:
                rest = is_gain[num_admitted:]
                num_admitted += len(rest) if rest.all() else int(rest.argmin())
                continue
            hoped = _hoped_survivals(step.survivals, ranked.lengths(num_admitted))[: num_drafted - num_admitted]
            hoped_tokens = tokens[num_admitted] + np.cumsum(hoped)
            hoped_theta = hoped_tokens / seconds[num_admitted + 1 : num_admitted + 1 + len(hoped)]
            if not len(hoped) or hoped_theta.max() <= theta[num_admitted]:
                break
            num_admitted += int(hoped_theta.argmax()) + 1
        return ranked.lengths(num_admitted)


class DelayedScheduler:
    """The variant for jagged step times (Sec. 5.2): an older step sets how many tokens, the present one says which.

    The budget is the unrestricted argmax of Theta over the survivals of two steps ago, at the present load; the step
    takes so many of its own highest survivals. Lossless because confidences of a step that was verified cannot contain
    a token drawn since: a draft must not be made again with the same noise at the same anchor. Where two steps ago
    nothing was drafted there is no such budget, and Algorithm 1 decides.
    """

    def __init__(self) -> None:
        self._earlier: deque[np.ndarray] = deque(maxlen=BUDGET_DELAY)  # survivals by rank, oldest step first

    def lengths(self, step: DraftedStep) -> list[int]:
        """See `PrefixScheduler`."""
        ranked = _ranked(step.survivals)
        stale = self._earlier[0] if len(self._earlier) == BUDGET_DELAY else ranked.survivals[:0]
        self._earlier.append(ranked.survivals)
        if not len(stale):
            return EarlyStopScheduler().lengths(step)
        return ranked.lengths(_best_budget(step, stale))


@dataclass(frozen=True)
class ThresholdScheduler:
    """Verifies tokens that survive with at least a fixed probability, the likeliest first where room is short.

    The threshold is on the product of confidences, so no token stands behind a hopeless one.
    """

    threshold: float  # in [0, 1]; 0 verifies all that can be accepted

    def __post_init__(self) -> None:
        assert 0.0 <= self.threshold <= 1.0, self.threshold

    def lengths(self, step: DraftedStep) -> list[int]:
        """See `PrefixScheduler`."""
        ranked = _ranked(step.survivals)
        num_likely = int(np.count_nonzero(ranked.survivals >= self.threshold))
        return ranked.lengths(min(num_likely, step.max_drafted))


@dataclass(frozen=True)
class FixedScheduler:
    """Verifies up to so many tokens of every draft, whatever their survival; short room is shared evenly."""

    length: int  # at least 0

    def __post_init__(self) -> None:
        assert self.length >= 0, self.length

    def lengths(self, step: DraftedStep) -> list[int]:
        """See `PrefixScheduler`. What cannot be shared evenly goes to earlier requests."""
        return even_shares([min(len(a), self.length) for a in step.survivals], step.max_drafted)


def even_shares(wanted: Sequence[int], room: int) -> list[int]:
    """Cut lengths to a sum of at most `room`, the longest first; what cannot be shared evenly goes to earlier ones."""
    if sum(wanted) <= room:
        return list(wanted)
    # All first tokens come before all second ones, as in Algorithm 1 with equal survivals.
    is_wanted = np.arange(max(wanted))[:, None] < np.array(wanted)  # [K, R]
    return _counts(np.nonzero(is_wanted)[1][:room], len(wanted))


@dataclass(frozen=True, kw_only=True)
class _Ranked:
    """The candidates of a step in the order of Algorithm 1; any first part of it takes prefixes of the drafts."""

    survivals: np.ndarray  # [n] float64, descending, above 0
    requests: np.ndarray  # [n] int64, whose token it is
    num_requests: int

    def lengths(self, num_admitted: int) -> list[int]:
        """Return the lengths after admitting the first so many, or all if there are fewer."""
        return _counts(self.requests[:num_admitted], self.num_requests)


def _ranked(survivals: Sequence[Sequence[float]]) -> _Ranked:
    """Sort by descending survival; ties go to the earlier position, then to the lower request (Alg. 1, line 1)."""
    table = SurvivalTable.of(survivals)
    values = table.values.ravel()
    # Position after position: a stable sort then breaks ties as wanted. Small integers are sorted several times faster.
    keys = -values if table.steps is None else -table.steps.ravel()
    order = np.argsort(keys, kind="stable")[: np.count_nonzero(values)]
    return _Ranked(survivals=values[order], requests=order % max(1, len(table)), num_requests=len(table))


def _theta(step: DraftedStep, survivals: np.ndarray) -> np.ndarray:
    """Return Theta [n + 1] after admitting 0, 1, .. n candidates with these survivals [n]."""
    return _tokens(step, survivals) / _seconds(step, len(survivals))


def _tokens(step: DraftedStep, survivals: np.ndarray) -> np.ndarray:
    """Return tau [n + 1] after admitting 0, 1, .. n candidates with these survivals [n]."""
    return np.cumsum(np.concatenate(([float(len(step.survivals))], survivals)))


def _seconds(step: DraftedStep, num_drafted: int) -> np.ndarray:
    """Return the seconds of the whole step [num_drafted + 1] with 0, 1, .. so many drafted tokens in it."""
    assert step.num_other_tokens >= len(step.survivals), (step.num_other_tokens, len(step.survivals))
    seconds = step.step_s(step.num_other_tokens + np.arange(num_drafted + 1)) + step.fixed_s
    assert seconds.shape == (num_drafted + 1,) and (seconds > 0.0).all(), seconds
    return seconds


def _hoped_survivals(survivals: Sequence[Sequence[float]], lengths: Sequence[int]) -> np.ndarray:
    """Return the survivals [n], descending, of what follows these lengths, judged by each request's next one alone."""
    table = SurvivalTable.of(survivals)
    going_on = np.nonzero(table.draft_lens > lengths)[0]
    first = np.array(lengths)[going_on] + 1  # position of the next token
    heads = table.values[first - 1, going_on]
    positions = np.arange(1, len(table.values) + 1)[:, None]
    places = np.nonzero((positions >= first) & (positions <= table.draft_lens[going_on]))
    hoped = heads[places[1]] ** ((places[0] + 1) / first[places[1]])
    hoped.sort()
    return hoped[::-1]


def _best_budget(step: DraftedStep, survivals: np.ndarray) -> int:
    """Return how many of these candidates [n], in order, give the highest Theta within the budget; fewest on ties."""
    return int(_theta(step, survivals[: step.max_drafted]).argmax())


def _counts(requests: np.ndarray, num_requests: int) -> list[int]:
    return np.bincount(requests, minlength=num_requests).tolist()
