"""The machine's measured speed: seconds of a target step by tokens and context, of a drafting pass by requests.

Made from timed samples, kept right by the steps of production, stored in the SPS file that other engines read too.
Measuring is left to others. No torch. Legend: n grid points, B tokens of a step.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from dspark.durable_file import write_durably
from dspark.errors import ConfigError

MIN_REPEATS = 3  # samples at a grid point; fewer show no spread
# A fall of time from a point to the next larger one is real if it exceeds the error of the two medians so many times.
MIN_JAG_ERRORS = 3.0
_MAD_OF_NORMAL = NormalDist().inv_cdf(0.75)  # median absolute deviation per standard deviation
_MEDIAN_ERROR = math.sqrt(math.pi / 2)  # standard error of a median per that of a mean

# Of the log error of each observed step: the share that goes to all sizes alike, and to those around its own. Other
# load on the machine slows all sizes, so most goes there; together they follow a change within about 12 steps.
COMMON_RATE = 0.06
OWN_RATE = 0.02
MAX_SURPRISE = 0.5  # log error that one step counts for at most: a stall of seconds is not a trend
MAX_COMMON_DRIFT = math.log(4.0)
MAX_OWN_DRIFT = math.log(1.5)


# The keys of the SPS file: three that other engines know, then ours. All else in it are `MeasuredTimes.details`.
_CONTEXT_KEYS = ("context_len", "long_context_len", "long_context_steps_per_sec")
_DRAFT_KEYS = ("sample_draft_requests", "sample_draft_seconds")
_TIME_KEYS = ("sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens", *_CONTEXT_KEYS, *_DRAFT_KEYS)


@dataclass(frozen=True)
class TimeCurve:
    """Seconds at grid points of a size, linear in between; beyond the last point it goes on as it last rose.

    Linear, not in steps: where the grid is dense (both sides of a tile's edge) it shows the machine's steps as they
    are, and where it is wide nobody knows where the step lies. A guessed plateau would make its tokens look free and
    its guessed edge would stop Algorithm 1. Beyond the grid a flat line would make every further token look free; a
    curve that nowhere rises stays flat. Below the first point it is flat.
    """

    sizes: tuple[int, ...]  # [n] ascending, at least 1
    seconds: tuple[float, ...]  # [n] above 0

    def __post_init__(self) -> None:
        is_ascending = all(a < b for a, b in zip((0, *self.sizes), self.sizes, strict=False))
        assert len(self.sizes) == len(self.seconds) >= 1 and is_ascending, (self.sizes, self.seconds)
        assert all(s > 0.0 and math.isfinite(s) for s in self.seconds), self.seconds

    @classmethod
    def from_samples(cls, samples: Mapping[int, Sequence[float]]) -> TimeCurve:
        """Return the medians of repeated timings, by size; a larger size that seems faster is believed if it is clear.

        A fall within the spread of the samples is noise: the points are pooled (pool adjacent violators), so that the
        curve does not fall there. A larger fall is a jag of the machine (a size that fits its tiles badly) and stays.
        The sizes are best timed in turn, round after round, so that a slow moment does not hit one size alone.
        """
        sizes = sorted(samples)
        assert sizes and all(len(samples[size]) >= MIN_REPEATS for size in sizes), samples
        medians = [float(np.median(samples[size])) for size in sizes]
        return cls(tuple(sizes), tuple(_pooled(medians, _median_errors([samples[size] for size in sizes]))))


@dataclass(frozen=True, kw_only=True)
class MeasuredTimes:
    """What was measured on one machine for one model, dtype and number of threads; what the SPS file holds."""

    target: TimeCurve  # over the tokens of a step, each with `context_len` tokens before it
    max_tokens: int  # largest step it is meant for; at least the last size
    context_len: int = 0
    long_target: TimeCurve | None = None  # the same sizes with `long_context_len` tokens; None: one context is known
    long_context_len: int = 0
    draft: TimeCurve | None = None  # a drafting pass over the requests drafted for; None: not measured, or no drafter
    details: Mapping[str, Any] = field(default_factory=dict)  # JSON values: hardware, model, dtype, threads, command

    def __post_init__(self) -> None:
        assert self.max_tokens >= self.target.sizes[-1], (self.max_tokens, self.target.sizes)
        context_lens = (self.context_len, self.long_context_len)
        if self.long_target is None:
            assert context_lens == (0, 0), context_lens
        else:
            assert self.long_target.sizes == self.target.sizes, (self.target.sizes, self.long_target.sizes)
            assert self.long_context_len > self.context_len >= 0, context_lens
        assert not set(_TIME_KEYS).intersection(self.details), list(self.details)


class StepTimes:
    """Predicts seconds of target steps and drafting passes on this machine, and follows its drift.

    Observed steps correct the measured curves by a factor, within bounds and slowly: one part for all sizes, one for
    the sizes around those observed. Neighbours share it, so that no edge appears where the machine has none.
    """

    def __init__(self, measured: MeasuredTimes) -> None:
        self.measured = measured
        short = np.array(measured.target.seconds)
        long = short if measured.long_target is None else np.array(measured.long_target.seconds)
        is_faster = long < short  # a longer context takes no less: what is left is noise of either
        self._short_s = np.where(is_faster, (short + long) / 2, short)  # [n]
        self._long_s = np.where(is_faster, self._short_s, long)
        self._target_drift = _Drift(measured.target.sizes)
        self._draft_drift = None if measured.draft is None else _Drift(measured.draft.sizes)

    @property
    def has_draft_times(self) -> bool:
        """Whether a drafting pass was measured."""
        return self._draft_drift is not None

    @property
    def target_drift(self) -> float:
        """How many times longer target steps take now than they were measured, all sizes alike."""
        return math.exp(self._target_drift.common)

    def target_s(self, num_tokens: np.ndarray, context_len: float) -> np.ndarray:
        """Return the seconds [m] of target steps over so many tokens [m], prefill included.

        `context_len` is the number of tokens before a token of the step, on average. Between the two measured lengths
        and beyond the longer one the time is linear in it, below the shorter one constant.
        """
        grid_s = self._grid_s(context_len) * self._target_drift.factors
        return _interpolated(num_tokens, self.measured.target.sizes, grid_s)

    def draft_s(self, num_requests: int) -> float:
        """Return the seconds of a drafting pass over so many requests; 0 for none. Ask only if `has_draft_times`."""
        return float(self.drafts_s(np.array([num_requests]))[0])

    def drafts_s(self, num_requests: np.ndarray) -> np.ndarray:
        """Return `draft_s` [m] of several numbers of requests [m]."""
        assert self.measured.draft is not None and self._draft_drift is not None, "no drafting pass was measured"
        curve = self.measured.draft
        grid_s = np.array(curve.seconds) * self._draft_drift.factors
        return np.where(num_requests > 0, _interpolated(num_requests, curve.sizes, grid_s), 0.0)

    def observe_target(self, num_tokens: int, context_len: float, seconds: float) -> None:
        """Learn from a target step of production, timed as the measured ones were."""
        base_s = _interpolated(np.array([num_tokens]), self.measured.target.sizes, self._grid_s(context_len))[0]
        self._target_drift.observe(num_tokens, seconds / float(base_s))

    def observe_draft(self, num_requests: int, seconds: float) -> None:
        """Learn from a drafting pass over at least one request; ask `has_draft_times` first."""
        assert self.measured.draft is not None and self._draft_drift is not None, "no drafting pass was measured"
        curve = self.measured.draft
        base_s = _interpolated(np.array([num_requests]), curve.sizes, np.array(curve.seconds))[0]
        self._draft_drift.observe(num_requests, seconds / float(base_s))

    def reset_drift(self) -> None:
        """Return to the measured curves."""
        self._target_drift = _Drift(self._target_drift.sizes)
        if self._draft_drift is not None:
            self._draft_drift = _Drift(self._draft_drift.sizes)

    def _grid_s(self, context_len: float) -> np.ndarray:
        """Return the measured seconds [n] at the grid points, for a context length."""
        span = self.measured.long_context_len - self.measured.context_len
        share = max(0.0, (context_len - self.measured.context_len) / span) if span > 0 else 0.0
        return self._short_s + share * (self._long_s - self._short_s)


class _Drift:
    """The correction of a curve: log factors at its grid points, learned from observed against measured times."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.common = 0.0  # log factor of all sizes
        self.factors = np.ones(len(sizes))  # [n] what the measured seconds are multiplied with
        self._own = np.zeros(len(sizes))  # [n] log factors on top of the common one

    def observe(self, size: int, ratio: float) -> None:
        """Move towards a time that was `ratio` times the measured one."""
        assert ratio > 0.0 and math.isfinite(ratio), (size, ratio)
        place = np.interp(size, self.sizes, np.arange(len(self.sizes)))  # in grid points; 1.5: between second and third
        weights = np.maximum(0.0, 1.0 - np.abs(place - np.arange(len(self.sizes))))  # [n] sum to 1, of two neighbours
        error = math.log(ratio) - self.common - float(weights @ self._own)
        error = min(max(error, -MAX_SURPRISE), MAX_SURPRISE)
        self.common = min(max(self.common + COMMON_RATE * error, -MAX_COMMON_DRIFT), MAX_COMMON_DRIFT)
        np.clip(self._own + OWN_RATE * error * weights, -MAX_OWN_DRIFT, MAX_OWN_DRIFT, out=self._own)
        self.factors = np.exp(self.common + self._own)


def _median_errors(samples: Sequence[Sequence[float]]) -> list[float]:
    """Return the standard error of each point's median.

    The spread of a handful of samples is itself a matter of chance, so a point counts with no less than the relative
    spread that is typical of all points.
    """
    medians = np.array([np.median(s) for s in samples])
    spreads = np.array([np.median(np.abs(np.array(s) - m)) for s, m in zip(samples, medians, strict=True)])
    spreads = np.maximum(spreads, np.median(spreads / medians) * medians) / _MAD_OF_NORMAL
    return [float(s) * _MEDIAN_ERROR / math.sqrt(len(x)) for s, x in zip(spreads, samples, strict=True)]


def _pooled(medians: Sequence[float], errors: Sequence[float]) -> list[float]:
    """Pool adjacent violators (Ayer et al. 1955) as far as the fall is within the errors of the two blocks' means."""
    blocks: list[tuple[float, float, int]] = []  # mean, its error, grid points
    for median, error in zip(medians, errors, strict=True):
        blocks.append((median, error, 1))
        while len(blocks) > 1:
            (mean, mean_error, count), (last, last_error, last_count) = blocks[-2:]
            if not 0.0 < mean - last <= MIN_JAG_ERRORS * math.hypot(mean_error, last_error):
                break
            total = count + last_count
            pooled_error = math.hypot(count * mean_error, last_count * last_error) / total
            blocks[-2:] = [((count * mean + last_count * last) / total, pooled_error, total)]
    return [mean for mean, _, count in blocks for _ in range(count)]


def _interpolated(at: np.ndarray, sizes: Sequence[int], seconds: np.ndarray) -> np.ndarray:
    """Return the seconds [m] at sizes [m] of the curve through the grid points; see `TimeCurve`."""
    if not (at > sizes[-1]).any():
        return np.interp(at, sizes, seconds)
    rises = np.diff(seconds) / np.diff(sizes)
    rising = rises[rises > 0.0]
    slope = float(rising[-1]) if len(rising) else 0.0
    return np.interp(at, sizes, seconds) + slope * np.maximum(0, at - sizes[-1])


# -- the SPS file --------------------------------------------------------------------------------------------------


def write_measured_times(path: Path, measured: MeasuredTimes) -> None:
    """Write the SPS file whole or not at all, and its folder. Raises `ConfigError` if the place cannot be written."""
    values: dict[str, Any] = {
        "sample_batch_tokens": list(measured.target.sizes),
        "sample_steps_per_sec": [1.0 / s for s in measured.target.seconds],
        "max_batch_tokens": measured.max_tokens,
    }
    if measured.long_target is not None:
        values["context_len"] = measured.context_len
        values["long_context_len"] = measured.long_context_len
        values["long_context_steps_per_sec"] = [1.0 / s for s in measured.long_target.seconds]
    if measured.draft is not None:
        values["sample_draft_requests"] = list(measured.draft.sizes)
        values["sample_draft_seconds"] = list(measured.draft.seconds)
    text = json.dumps({**values, **measured.details}, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, text)
    except OSError as error:
        raise ConfigError(f"the capacity file {path} cannot be written: {error}; choose another folder") from error


def read_measured_times(path: Path) -> MeasuredTimes:
    """Read an SPS file of ours or of another engine. Raises `ConfigError` naming the file and the key that is wrong."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the capacity file {path} cannot be read: {error}; measure again") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the capacity file {path} holds a {type(values).__name__}, not an object; measure again")
    file = _SpsFile(path, values)
    # Other engines write a single point for "not measured": with it every token would be free (case J1).
    sizes = file.sizes("sample_batch_tokens", num_at_least=2)
    target = TimeCurve(sizes, file.seconds_of_rates("sample_steps_per_sec", len(sizes)))
    long_target = draft = None
    context_len = long_context_len = 0
    if file.has_any(_CONTEXT_KEYS):
        context_len = file.integer("context_len", at_least=0)
        long_context_len = file.integer("long_context_len", at_least=context_len + 1)
        long_target = TimeCurve(sizes, file.seconds_of_rates("long_context_steps_per_sec", len(sizes)))
    if file.has_any(_DRAFT_KEYS):
        draft_sizes = file.sizes("sample_draft_requests", num_at_least=1)
        draft = TimeCurve(draft_sizes, file.positive("sample_draft_seconds", len(draft_sizes)))
    return MeasuredTimes(
        target=target,
        max_tokens=file.integer("max_batch_tokens", at_least=sizes[-1]),
        context_len=context_len,
        long_target=long_target,
        long_context_len=long_context_len,
        draft=draft,
        details={key: value for key, value in values.items() if key not in _TIME_KEYS},
    )


@dataclass(frozen=True)
class _SpsFile:
    """The values of an SPS file; each is checked when it is asked for."""

    path: Path
    values: dict[str, Any]

    def has_any(self, keys: Sequence[str]) -> bool:
        """Return whether one of the keys stands in the file; then all of them must."""
        return any(key in self.values for key in keys)

    def sizes(self, key: str, *, num_at_least: int) -> tuple[int, ...]:
        """Return so many or more ascending integers, each at least 1."""
        sizes = self._list(key)
        is_ascending = all(_is_integer(size) for size in sizes) and all(
            a < b for a, b in zip([0, *sizes], sizes, strict=False)
        )
        if not is_ascending or len(sizes) < num_at_least:
            raise self._wrong(key, f"must hold at least {num_at_least} ascending integers, none below 1")
        return tuple(sizes)

    def positive(self, key: str, num: int) -> tuple[float, ...]:
        """Return `num` numbers above 0."""
        numbers = self._list(key)
        if len(numbers) != num or not all(_is_positive(number) for number in numbers):
            raise self._wrong(key, f"must hold {num} finite numbers above 0, one for each size")
        return tuple(map(float, numbers))

    def seconds_of_rates(self, key: str, num: int) -> tuple[float, ...]:
        """Return the seconds of `num` steps from steps per second."""
        return tuple(1.0 / rate for rate in self.positive(key, num))

    def integer(self, key: str, *, at_least: int) -> int:
        """Return an integer of at least so much."""
        value = self._value(key)
        if not _is_integer(value) or value < at_least:
            raise self._wrong(key, f"must be an integer, at least {at_least}")
        return int(value)

    def _list(self, key: str) -> list[Any]:
        value = self._value(key)
        if not isinstance(value, list):
            raise self._wrong(key, "must be a list")
        return value

    def _value(self, key: str) -> Any:
        if key not in self.values:
            raise ConfigError(f"the capacity file {self.path} has no {key}; measure again")
        return self.values[key]

    def _wrong(self, key: str, rule: str) -> ConfigError:
        shown = reprlib.repr(self.values[key])
        return ConfigError(f"{key} ({shown}) in the capacity file {self.path} {rule}; measure again")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value < 2**53


def _is_positive(value: Any) -> bool:
    # Rates so small or so large that their seconds overflow are as wrong as infinity.
    return isinstance(value, int | float) and not isinstance(value, bool) and 1e-9 < value < 1e9
