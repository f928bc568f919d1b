"""Measures this machine: seconds of a target pass by tokens at two context lengths, of a drafting pass by requests.

Runs real passes over pages that nobody owns yet: it is for an engine that has had no request. Nothing is left behind:
a page is cleared when its first owner begins it, and proposers learn from verdicts alone, of which there are none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from dspark.batch import BatchRow
from dspark.engine.profile_rows import ProfileLimits, ProfileRows
from dspark.engine.runner import TargetRunner
from dspark.request import SamplingParams
from dspark.speculation.capacity import MIN_REPEATS, MeasuredTimes, TimeCurve
from dspark.speculation.proposal import DraftContext, Proposer

logger = logging.getLogger(__name__)

BUDGET_S = 12.0  # of all passes together, so that a start stays well under 15 s
MAX_REPEATS = 9  # on a fast machine the budget is not used up
# Dense where most steps are and on both sides of what kernels work in tiles of.
TARGET_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)
DRAFT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# What there is no time for is left out from the back: few points far apart say more than many close together.
COARSE_SIZES, MIDDLE_SIZES = (1, 8, 32), (2, 4, 16, 64, 128)
# What a longer context adds to a pass grows with its rows, without steps: these sizes tell all of it.
LONG_SIZES = (*COARSE_SIZES, *MIDDLE_SIZES)
WARM_UP_COUNTS_S = 0.1  # the first pass of a size prepares kernels, which a pass this long does not notice
FILL_SHARE = 0.1  # of the budget, for touching pages
FILL_CHUNK = 16  # pages touched at a time
# What runs once at a start that measures nothing: a pass of a single token, steps of one, a few and many requests, and
# a chunk of prefill.
WARM_UP_BUDGET_S = 1.5
WARM_UP_SIZES = (1, 6, 16, 64, 256)
WARM_UP_PAGES = 64
MAX_CATCH_UP_CALLS = 64  # a draft model reads the texts first, a part with each call
PROFILE_SERIAL = -1  # of pages; what an allocator hands out is positive

Progress = Callable[[float], None]  # share of the time budget that is used, 0 to 1

TARGET, DRAFT, LONG = "target", "draft", "long_target"


@dataclass(kw_only=True, eq=False)
class _Point:
    """One pass to be timed."""

    kind: str
    size: int
    run: Callable[[], None]
    is_needed: bool = False  # measured at any cost
    samples: list[float] = field(default_factory=list)  # seconds
    latest_s: float = 0.0

    @property
    def num_missing(self) -> int:
        return max(0, MIN_REPEATS - len(self.samples))

    def __str__(self) -> str:
        unit = "requests" if self.kind == DRAFT else "tokens"
        return f"{self.kind} of {self.size} {unit}"


class _DraftingFailed(Exception):
    """The proposer raised, or drafts nothing however often it is asked."""


def measure_times(
    runner: TargetRunner,
    proposer: Proposer | None,
    *,
    limits: ProfileLimits,
    details: Mapping[str, Any] | None = None,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = lambda _: None,
) -> MeasuredTimes:
    """Time target passes (with the hand-over of features to a proposer that taps) and drafting passes, in turn.

    All pages must be free. Within the budget every point is timed `MIN_REPEATS` times or more; points there is no time
    for are left out with a warning, but two target sizes and one drafting pass are measured at any cost. A proposer
    that fails is not measured (`draft` is None), with a warning.
    """
    profiler = _Profiler(runner, proposer, limits, budget_s=budget_s, clock=clock, progress=progress)
    samples = profiler.measure((TARGET, DRAFT, LONG))
    target = TimeCurve.from_samples(samples[TARGET])
    long_target = _long_curve(target, samples[LONG], limits.num_rows) if len(samples[LONG]) > 1 else None
    context_len, long_context_len = profiler.context_lens
    return MeasuredTimes(
        target=target,
        max_tokens=limits.max_batch_tokens,
        context_len=0 if long_target is None else context_len,
        long_target=long_target,
        long_context_len=0 if long_target is None else long_context_len,
        draft=TimeCurve.from_samples(samples[DRAFT]) if samples[DRAFT] else None,
        details=details or {},
    )


def measure_draft_times(
    runner: TargetRunner,
    proposer: Proposer,
    *,
    limits: ProfileLimits,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = lambda _: None,
) -> TimeCurve | None:
    """Time drafting passes alone, for a capacity file without them; None where there is no pass or it fails."""
    profiler = _Profiler(runner, proposer, limits, budget_s=budget_s, clock=clock, progress=progress)
    samples = profiler.measure((DRAFT,))[DRAFT]
    return TimeCurve.from_samples(samples) if samples else None


def warm_up_passes(
    runner: TargetRunner,
    proposer: Proposer | None,
    *,
    limits: ProfileLimits,
    budget_s: float = WARM_UP_BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run target passes of a few sizes and a drafting pass once, as measuring does, so that no request is the first.

    Weights are read and kernels prepare for sizes they had not met. All pages must be free, and nothing is left behind.
    The budget is kept to but for one target pass; a drafter that fails is reported.
    """
    _Profiler(runner, proposer, limits, budget_s=budget_s, clock=clock, progress=lambda _: None).warm_up()


class _Profiler:
    """One run over all points within a time budget."""

    def __init__(
        self,
        runner: TargetRunner,
        proposer: Proposer | None,
        limits: ProfileLimits,
        *,
        budget_s: float,
        clock: Callable[[], float],
        progress: Progress,
    ) -> None:
        self.context_lens = limits.context_lens
        self._runner = runner
        self._proposer = proposer
        self._limits = limits
        self._clock = clock
        self._progress = progress
        self._start = clock()
        self._budget_s = budget_s
        self._deadline = self._start + budget_s
        self._hands_over_features = proposer is not None and bool(proposer.tapped_layers)
        self._has_drafting_failed = False
        self._used_ids: set[str] = set()
        self._points: list[_Point] = []  # chosen, and not left out since
        self._left_out: list[_Point] = []

    def measure(self, kinds: Sequence[str]) -> dict[str, dict[int, list[float]]]:
        """Return kind -> size -> seconds of each pass, at least `MIN_REPEATS` of them."""
        try:
            rows = self._filled_rows(self._limits.num_touched_pages)
            self._choose([point for point in self._all_points(rows) if point.kind in kinds])
            self._repeat()
        finally:
            self._release()
        self._progress(1.0)
        if self._left_out:
            left_out = ", ".join(map(str, sorted(self._left_out, key=lambda p: (p.kind, p.size))))
            logger.warning(
                "measuring this machine left out what did not fit into %.0f s (%s); times there are guessed from the "
                "others, `dspark profile` measures again",
                self._budget_s,
                left_out,
            )
        samples: dict[str, dict[int, list[float]]] = {kind: {} for kind in (TARGET, DRAFT, LONG)}
        for point in sorted(self._points, key=lambda p: p.size):
            samples[point.kind][point.size] = point.samples
        return samples

    def warm_up(self) -> None:
        """Run one pass of each kind and then those of more sizes that fit into the budget."""
        try:
            rows = self._filled_rows(min(WARM_UP_PAGES, self._limits.num_touched_pages))
            sizes = [size for size in WARM_UP_SIZES if size <= self._limits.max_batch_tokens]
            target, draft = self._target_points(TARGET, rows, sizes), self._draft_points(rows, self.context_lens[0])
            for point in (*target[:1], *draft[:1], *target[1:]):
                fits = not self._points or self._clock() + self._expected_s(point) <= self._deadline
                if fits and self._time(point, counts=False):
                    self._points.append(point)
        finally:
            self._release()

    def _release(self) -> None:
        if self._proposer is not None:
            for request_id in sorted(self._used_ids):
                self._proposer.release(request_id)

    # -- passes --------------------------------------------------------------------------------------------------

    def _filled_rows(self, num_wanted: int) -> ProfileRows:
        """Touch pages as far as time allows: memory that was never written reads faster than any real context."""
        num_filled = 0
        while num_filled < num_wanted:
            pages = range(num_filled, min(num_filled + FILL_CHUNK, num_wanted))
            # A row that begins a page makes the pools write all of it.
            self._run_target(
                [BatchRow(token_ids=[0], start_position=0, page_ids=[page], num_logits=1) for page in pages]
            )
            num_filled = pages.stop
            if self._clock() - self._start > FILL_SHARE * self._budget_s:
                break
        return ProfileRows(self._limits, num_pages=num_filled)

    def _run_target(self, rows: Sequence[BatchRow]) -> None:
        """Run one target pass to its end, on whatever device."""
        logits = self._runner.execute(rows)
        if self._hands_over_features:
            assert self._proposer is not None
            features = self._runner.committed_features([len(row.token_ids) for row in rows])
            try:
                self._proposer.take_features(features)
            except Exception:  # it may fail in service too, where it costs its drafts and not the start
                logger.exception("the %s drafter failed to take features; they are left out", self._proposer.name)
                self._hands_over_features = False
        logits[-1, 0].item()  # waits for a device that works on its own

    def _run_draft(self, contexts: Sequence[DraftContext]) -> None:
        """Draft for all contexts; the first calls feed their texts to a draft model."""
        assert self._proposer is not None
        self._used_ids.update(context.request_id for context in contexts)
        try:
            for _ in range(MAX_CATCH_UP_CALLS):
                if all(draft.token_ids for draft in self._proposer.propose(contexts)):
                    return
        except Exception as error:
            logger.exception("the %s drafter failed while it was measured", self._proposer.name)
            raise _DraftingFailed from error
        logger.warning("the %s drafter drafts nothing for the texts it is measured with", self._proposer.name)
        raise _DraftingFailed

    def _all_points(self, rows: ProfileRows) -> list[_Point]:
        """Return everything that could be timed, the most telling first."""
        context_len, long_context_len = self.context_lens
        target = self._target_points(TARGET, rows, [s for s in TARGET_SIZES if s <= self._limits.max_batch_tokens])
        long_points = []
        if long_context_len:
            long_points = self._target_points(LONG, rows, [p.size for p in target if p.size in LONG_SIZES])
        draft = self._draft_points(rows, context_len)
        assert len(target) > 1, self._limits
        needed = sorted(target, key=lambda p: _level(p.size))[:2] + draft[:1]
        for point in needed:
            point.is_needed = True
        by_kind = {TARGET: 0, DRAFT: 1, LONG: 2}
        return sorted(chain(target, draft, long_points), key=lambda p: (_level(p.size), by_kind[p.kind], p.size))

    def _target_points(self, kind: str, rows: ProfileRows, sizes: Sequence[int]) -> list[_Point]:
        context_len = self.context_lens[1 if kind == LONG else 0]
        points = []
        for size in sizes:
            batch = rows.decoding(size, context_len)
            if batch is not None:  # else this cache never sees such a step
                points.append(_Point(kind=kind, size=size, run=partial(self._run_target, batch)))
        return points

    def _draft_points(self, rows: ProfileRows, context_len: int) -> list[_Point]:
        if self._proposer is None or not self._proposer.has_pass or self._limits.num_draft_tokens == 0:
            return []
        points = []
        for size in (s for s in DRAFT_SIZES if s <= self._limits.max_size):
            tables = rows.drafting_tables(size, context_len)
            if tables is None:
                break
            contexts = [self._draft_context(i, context_len, table) for i, table in enumerate(tables)]
            points.append(_Point(kind=DRAFT, size=size, run=partial(self._run_draft, contexts)))
        return points

    def _draft_context(self, index: int, context_len: int, page_ids: list[int]) -> DraftContext:
        return DraftContext(
            request_id=f"profile:{index}",
            token_ids=[0] * context_len + [1],  # nothing that n-gram could find: its drafts would save the pass
            sampling=SamplingParams(temperature=0.0),
            seed=index,
            is_coupled=False,
            num_draft_tokens=self._limits.num_draft_tokens,
            page_ids=page_ids,
            page_serials=[PROFILE_SERIAL] * len(page_ids),
        )

    # -- what to time, and how often -----------------------------------------------------------------------------

    def _choose(self, ordered: Sequence[_Point]) -> None:
        """Run points once, in order of their worth, as long as the repeats of all those chosen will fit."""
        reserved_s = 0.0
        for point in ordered:
            if point.kind == DRAFT and self._has_drafting_failed:
                continue
            needs_s = MIN_REPEATS * self._expected_s(point)
            if not point.is_needed and self._clock() + reserved_s + needs_s > self._deadline:
                self._left_out.append(point)
                continue
            if self._time(point, counts=False):
                if point.latest_s >= WARM_UP_COUNTS_S:
                    point.samples.append(point.latest_s)
                reserved_s += point.num_missing * point.latest_s
                self._points.append(point)

    def _repeat(self) -> None:
        """Time all points round after round, so that a slow moment does not hit one of them alone."""
        for round_number in range(MAX_REPEATS):
            if round_number >= MIN_REPEATS and not any(self._fits(point) for point in self._points):
                break
            for point in sorted(self._points, key=lambda p: (p.size, p.kind)):
                if point not in self._points or len(point.samples) > round_number:
                    continue
                if self._fits(point) or (point.is_needed and point.num_missing):
                    self._time(point, counts=True)
                elif point.num_missing:  # the machine became slower meanwhile
                    self._points.remove(point)
                    self._left_out.append(point)

    def _fits(self, point: _Point) -> bool:
        return self._clock() + max(1, point.num_missing) * point.latest_s <= self._deadline

    def _time(self, point: _Point, *, counts: bool) -> bool:
        """Time one pass; False where drafting failed, whose points are then gone."""
        start = self._clock()
        try:
            point.run()
        except _DraftingFailed:
            self._has_drafting_failed = True
            self._points = [p for p in self._points if p.kind != DRAFT]
            return False
        point.latest_s = self._clock() - start
        if counts:
            point.samples.append(point.latest_s)
        self._progress(min(1.0, (self._clock() - self._start) / self._budget_s))
        return True

    def _expected_s(self, point: _Point) -> float:
        """Return a bound on the seconds of a pass from those that ran: time grows at most in proportion to size."""
        same = [p for p in self._points if p.kind == point.kind]
        known = same or [p for p in self._points if p.kind == TARGET]
        bounds = [p.latest_s * max(1.0, point.size / p.size) for p in known]
        is_guess = point.kind == LONG and not same
        return min(bounds, default=0.0) * (2.0 if is_guess else 1.0)


def _level(size: int) -> int:
    return 0 if size in COARSE_SIZES else 1 if size in MIDDLE_SIZES else 2


def _long_curve(target: TimeCurve, samples: Mapping[int, Sequence[float]], num_rows: Callable[[int], int]) -> TimeCurve:
    """Return the curve of the longer context at all sizes of `target`, from what it adds for so many rows."""
    measured = TimeCurve.from_samples(samples)
    added = np.maximum(0.0, np.array(measured.seconds) - np.interp(measured.sizes, target.sizes, target.seconds))
    by_rows: dict[int, list[float]] = {}
    for size, seconds in zip(measured.sizes, added, strict=True):
        by_rows.setdefault(num_rows(size), []).append(float(seconds))
    rows = [num_rows(size) for size in target.sizes]
    long_s = target.seconds + np.interp(rows, sorted(by_rows), [np.mean(by_rows[n]) for n in sorted(by_rows)])
    return TimeCurve(target.sizes, tuple(map(float, long_s)))
