"""What a faulty drafter, planner or verification may cost: drafts, and nothing else."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.config import SpeculationConfig
from dspark.engine.compute_thread import ComputeThread
from dspark.engine.drafting import ERRORS_SHOWN_EVERY, Drafting
from dspark.engine.guard import FaultLimits
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.scheduler import ScheduledRow
from dspark.engine.sequence import Sequence as RequestSequence
from dspark.metrics import EngineMetrics
from dspark.request import Request, SamplingParams
from dspark.speculation.planner import Load
from dspark.speculation.proposal import NO_DRAFT, CommittedFeatures, Draft, DraftContext, Forecast, Proposer
from dspark.speculation.verification import VerificationResult

NEVER, PAGE_SIZE, LENGTH = 1e6, 4, 3
AT_ONCE = FaultLimits(slow_at_least_s=NEVER, hanging_at_least_s=NEVER, first_pause_s=0.0)
RESTING = FaultLimits(slow_at_least_s=NEVER, hanging_at_least_s=NEVER, first_pause_s=NEVER)
HANGING = FaultLimits(slow_at_least_s=NEVER, hanging_at_least_s=0.05, first_pause_s=0.0)


def fail() -> Any:
    raise RuntimeError("down")


class Drafter(Proposer):
    """A proposer with a pass, for which `before[call]` is run first; has a free draft for requests in `free`."""

    name = "drafter"
    has_pass = True
    tapped_layers = (0,)

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.before: dict[str, Callable[[], Any]] = {}
        self.free: set[str] = set()
        self.bad: set[str] = set()  # requests whose drafts leave the vocabulary

    def count(self, call: str) -> int:
        return sum(name == call for name, _ in self.calls)

    def take_features(self, committed: CommittedFeatures) -> None:
        self._call("take_features")

    def forecast(self, contexts: Sequence[DraftContext]) -> list[Forecast]:
        self._call("forecast")
        return [Forecast(free=[0.5] if c.request_id in self.free else (), paid=[0.9]) for c in contexts]

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self._call("propose", {c.request_id: c.joins_pass for c in contexts})
        return [self._draft(c) for c in contexts]

    def _draft(self, context: DraftContext) -> Draft:
        if not context.joins_pass and context.request_id not in self.free:
            return NO_DRAFT
        tokens = [99 if context.request_id in self.bad and context.joins_pass else 1] * context.num_draft_tokens
        return Draft(token_ids=tokens, confidences=[0.9] * len(tokens))

    def take_verdict(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        self._call("take_verdict", request_id)

    def release(self, request_id: str) -> None:
        self._call("release", request_id)

    def calibration_errors(self) -> Sequence[float | None]:
        self._call("calibration_errors")
        return ()

    def reset_calibration(self) -> None:
        self._call("reset_calibration")

    def _call(self, name: str, about: Any = None) -> None:
        self.calls.append((name, about))
        self.before.get(name, lambda: None)()


class FreeDrafter(Drafter):
    """The same without a pass."""

    has_pass = False
    tapped_layers = ()


class StubPlanner:
    """Lets everybody join and verifies everything, but for what `replaced` says."""

    def __init__(self, **replaced: Callable[..., Any]) -> None:
        self.replaced = replaced
        self.num_chosen = 0
        self.num_declined: Counter[str] = Counter()
        self.num_probes, self.times = 0, None

    def rests(self, num_requests: int) -> bool:
        return self.replaced.get("rests", lambda: False)()

    def choose(self, request_ids: Sequence[str], forecasts: Sequence[Forecast], load: Load) -> list[bool]:
        self.num_chosen += 1
        return self.replaced.get("choose", lambda: [True] * len(request_ids))()

    def lengths(self, request_ids: Sequence[str], confidences: Sequence[Any], load: Load) -> list[int]:
        return self.replaced.get("lengths", lambda: [len(c or ()) for c in confidences])()

    def observe_verdict(self, request_id: str, num_accepted: int) -> None:
        self.replaced.get("observe_verdict", lambda: None)()

    def release(self, request_id: str) -> None:
        self.replaced.get("release", lambda: None)()


class Bench:
    """Drafting over fakes."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        planner: Any = None,
        limits: FaultLimits = AT_ONCE,
        fallback: str = "auto",
        num_pages: int = 64,
    ) -> None:
        self.metrics = EngineMetrics("toy")
        self.allocator = PageAllocator(num_pages, PAGE_SIZE)
        self.sequences: list[RequestSequence] = []
        self.drafting = Drafting(
            proposer,
            compute=ComputeThread(),
            planner=planner,
            allocator=self.allocator,
            vocab_size=16,
            speculation=SpeculationConfig(num_draft_tokens=LENGTH, fallback_strategy=fallback),
            metrics=self.metrics,
            limits=limits,
        )
        self.runner: Any = SimpleNamespace(committed_features=lambda num_committed: None)

    def sequence(self, request_id: str, num_tokens: int = 4) -> RequestSequence:
        """Return a request that decodes and owns the pages of its text alone."""
        tokens = list(range(num_tokens))
        sequence = RequestSequence(
            request=Request(request_id=request_id, prompt_token_ids=tokens[:-1], sampling=SamplingParams()),
            output=SimpleNamespace(num_tokens_left=50),  # type: ignore[arg-type]
            token_ids=tokens,
            verification="rejection",
            max_draft_tokens=LENGTH,
            masked_token_ids=frozenset(),
            seed=0,
            num_computed=num_tokens - 1,
        )
        assert sequence.grow_pages(num_tokens, self.allocator)
        self.sequences.append(sequence)
        return sequence

    def load(self, sequences: Sequence[RequestSequence]) -> Load:
        return Load(num_decoding=len(sequences), num_prefill_tokens=0, max_tokens=64, context_len=0.0)

    def draft(self, *sequences: RequestSequence) -> list[int]:
        """Draft a round anew and return the lengths of the drafts."""
        for sequence in sequences:
            sequence.draft = NO_DRAFT
        self.drafting.draft(sequences, self.load(sequences))
        self.allocator.check_integrity(s.page_ids for s in self.sequences)
        return [len(s.draft.token_ids) for s in sequences]

    def plan(self, *sequences: RequestSequence) -> list[int]:
        return self.drafting.plan_lengths(list(sequences), self.load(sequences))

    def take_features(self, *sequences: RequestSequence) -> None:
        results = [VerificationResult(num_accepted=0, token_ids=[1]) for _ in sequences]
        rows = [ScheduledRow(sequence=s, num_tokens=1) for s in sequences]
        self.drafting.take_features(rows, results, self.runner, 0.001)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, {"model_name": "toy", **labels}) or 0.0

    def wait_until_free(self) -> None:
        deadline = time.monotonic() + 10.0
        while self.drafting.guard.is_blocked:
            assert time.monotonic() < deadline, "the call never came back"
            time.sleep(0.001)


# -- calls that hang -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["forecast", "propose"])
def test_while_a_call_hangs_nothing_touches_the_drafter_and_its_late_return_is_cleared_away(call: str) -> None:
    drafter, back = Drafter(), threading.Event()
    planner = StubPlanner()
    bench = Bench(drafter, planner=planner, limits=HANGING)
    a, b = bench.sequence("a"), bench.sequence("b")
    drafter.before[call] = back.wait

    assert bench.draft(a, b) == [0, 0]
    assert bench.drafting.state == "open"
    num_calls, num_chosen = len(drafter.calls), planner.num_chosen
    bench.drafting.release("a")  # it ends
    bench.drafting.take_verdict(b, Draft(token_ids=[1]), num_accepted=1, num_emitted=2)
    bench.drafting.reset_learned()
    assert bench.draft(b) == [0]
    bench.take_features(b)
    assert len(drafter.calls) == num_calls
    assert not b.shares_pages  # its features were lost

    del drafter.before[call]
    back.set()
    bench.wait_until_free()
    c = bench.sequence("c")
    num_calls = len(drafter.calls)
    assert bench.draft(c) == [LENGTH]
    late = drafter.calls[num_calls:]
    # what the late call kept of a and b goes, what was asked for meanwhile is done, and only then it is used again
    assert late[:4] == [("release", "a"), ("release", "b"), ("release", "a"), ("reset_calibration", None)]
    assert [name for name, _ in late[4:]] == ["forecast", "propose"]
    assert bench.drafting.state == "on"
    assert planner.num_chosen == num_chosen + 1, "a call that was left behind reached the planner"
    assert bench.value("dspark:breaker_changes_total", to="open") == 1
    assert bench.value("dspark:breaker_changes_total", to="closed") == 1


def test_features_that_hang_cost_one_wait_and_then_rest() -> None:
    drafter, back = Drafter(), threading.Event()
    drafter.before["take_features"] = back.wait
    bench = Bench(drafter, limits=FaultLimits(slow_at_least_s=NEVER, hanging_at_least_s=0.05, first_pause_s=NEVER))
    a = bench.sequence("a")

    bench.take_features(a)
    back.set()
    bench.wait_until_free()
    for _ in range(5):
        bench.take_features(a)

    assert drafter.count("take_features") == 1
    assert not a.shares_pages


# -- features ------------------------------------------------------------------------------------------------------


def test_lost_features_keep_their_requests_out_of_the_pass_until_they_start_anew() -> None:
    drafter = Drafter()
    drafter.free = {"a"}
    bench = Bench(drafter)
    a, b = bench.sequence("a"), bench.sequence("b")
    drafter.before["take_features"] = fail
    bench.take_features(a)
    del drafter.before["take_features"]
    bench.take_features(a, b)

    bench.draft(a, b)
    assert drafter.calls[-1] == ("propose", {"a": False, "b": True})
    assert [d.draft.token_ids for d in (a, b)] == [[1] * LENGTH] * 2  # the free one still counts

    a.release_pages(bench.allocator)  # preempted: all of it is computed again
    a.grow_pages(len(a.token_ids), bench.allocator)
    bench.draft(a, b)
    assert drafter.calls[-1] == ("propose", {"a": True, "b": True})


def test_features_that_keep_failing_rest_although_drafts_go_well() -> None:
    drafter = Drafter()
    drafter.before["take_features"] = fail
    bench = Bench(drafter, limits=RESTING)
    for i in range(5):
        bench.take_features(bench.sequence(f"old{i}"))
        assert bench.draft(bench.sequence(f"new{i}")) == [LENGTH]

    assert drafter.count("take_features") == 3
    assert bench.drafting.state == "open"


def test_features_are_tried_again_after_the_pause() -> None:
    drafter = Drafter()
    drafter.before["take_features"] = fail
    bench = Bench(drafter, limits=AT_ONCE)
    for _ in range(3):
        bench.take_features(bench.sequence("a"))
    assert bench.drafting.state == "probing"
    del drafter.before["take_features"]
    b = bench.sequence("b")
    bench.take_features(b)

    assert b.shares_pages and bench.drafting.state == "on"


# -- the pass and what is free -------------------------------------------------------------------------------------


def test_while_the_pass_rests_free_drafts_go_on_and_nothing_is_drawn_for_others() -> None:
    drafter = Drafter()
    drafter.before["propose"] = fail
    bench = Bench(drafter, planner=StubPlanner(), limits=RESTING)
    a, b = bench.sequence("a"), bench.sequence("b")
    assert [bench.draft(a, b) for _ in range(3)] == [[0, 0]] * 3
    del drafter.before["propose"]
    num_proposed = drafter.count("propose")
    last_serial = max(map(bench.allocator.serial, range(64)))

    assert bench.draft(a, b) == [0, 0]
    assert drafter.count("propose") == num_proposed
    assert max(map(bench.allocator.serial, range(64))) == last_serial, "a page was taken for drafts that are not made"
    assert bench.value("dspark:drafts_declined_total", reason="breaker") == 2

    drafter.free = {"b"}
    assert bench.draft(a, b) == [0, LENGTH]
    assert drafter.calls[-1] == ("propose", {"b": False})
    assert bench.drafting.state == "open"


def test_a_pass_that_works_again_is_used_again() -> None:
    drafter = Drafter()
    drafter.before["propose"] = fail
    bench = Bench(drafter, limits=AT_ONCE)
    a = bench.sequence("a")
    for _ in range(5):
        bench.draft(a)
    assert bench.value("dspark:speculation_state", state="probing") == 1
    del drafter.before["propose"]

    assert bench.draft(a) == [LENGTH]
    assert bench.value("dspark:speculation_state", state="on") == 1
    assert bench.value("dspark:breaker_changes_total", to="closed") == 1


@pytest.mark.parametrize("answer", [None, [], [None], [Draft(token_ids=[None])], [Draft(token_ids=[1.0])], 7])
@pytest.mark.parametrize("kind", [Drafter, FreeDrafter])
def test_an_answer_of_any_shape_costs_its_drafts_alone(answer: Any, kind: type[Drafter]) -> None:
    drafter = kind()
    drafter.propose = lambda contexts: answer  # type: ignore[method-assign]
    bench = Bench(drafter, limits=RESTING)

    assert [bench.draft(bench.sequence("a")) for _ in range(4)] == [[0]] * 4
    assert bench.value("dspark:drafter_failures_total") >= 3
    assert bench.drafting.state == "open"


def test_a_forecast_that_is_none_costs_its_round() -> None:
    drafter = Drafter()
    drafter.forecast = lambda contexts: [None]  # type: ignore[method-assign, list-item, return-value]
    bench = Bench(drafter, planner=StubPlanner(choose=fail))

    assert bench.draft(bench.sequence("a")) == [0]


def test_a_request_with_bad_drafts_is_left_out_and_the_others_are_not() -> None:
    drafter = Drafter()
    drafter.bad, drafter.free = {"a"}, {"a"}
    bench = Bench(drafter, limits=RESTING)
    a, b = bench.sequence("a"), bench.sequence("b")
    assert [bench.draft(a, b) for _ in range(3)] == [[0, LENGTH]] * 3

    for _ in range(2):  # a good free draft says nothing of the pass
        assert bench.draft(a, b) == [LENGTH, LENGTH]
        assert drafter.calls[-1] == ("propose", {"a": False, "b": True})
    assert bench.drafting.state == "on"

    bench.drafting.release("a")
    drafter.bad = set()
    bench.draft(a, b)
    assert drafter.calls[-1] == ("propose", {"a": True, "b": True})


def test_a_request_whose_free_drafts_are_bad_gets_none_either() -> None:
    drafter = FreeDrafter()
    drafter.bad = {"a"}
    bench = Bench(drafter, limits=RESTING)
    a, b = bench.sequence("a"), bench.sequence("b")
    for _ in range(4):
        assert bench.draft(a, b) == [0, LENGTH]

    assert drafter.calls[-1] == ("propose", {"b": True})


def test_one_slow_call_is_forgiven_and_three_are_not() -> None:
    drafter = Drafter()
    drafter.before["propose"] = lambda: time.sleep(0.3)
    bench = Bench(drafter, limits=FaultLimits(slow_at_least_s=0.25, hanging_at_least_s=NEVER, first_pause_s=NEVER))
    a = bench.sequence("a")

    assert bench.draft(a) == [LENGTH]  # the first call of all; what came late is used all the same
    assert bench.drafting.state == "on"
    for _ in range(2):
        bench.draft(a)
    assert bench.drafting.state == "open"
    assert bench.draft(a) == [0]


def test_the_limits_grow_with_the_targets_passes() -> None:
    drafter = Drafter()
    drafter.before["propose"] = lambda: time.sleep(0.02)
    limits = FaultLimits(slow_at_least_s=0.0, hanging_at_least_s=0.0, slow_passes=1e4, hanging_passes=1e4)
    bench = Bench(drafter, limits=limits)
    bench.take_features(bench.sequence("a"))  # whose pass took a millisecond

    assert bench.draft(bench.sequence("b")) == [LENGTH]
    assert bench.value("dspark:drafter_failures_total") == 0


# -- the planner and verification ----------------------------------------------------------------------------------


@pytest.mark.parametrize("choose", [fail, list, lambda: None])
def test_a_planner_that_cannot_choose_lets_nobody_join_and_free_drafts_go_on(choose: Callable[[], Any]) -> None:
    drafter = Drafter()
    drafter.free = {"b"}
    bench = Bench(drafter, planner=StubPlanner(choose=choose))

    assert bench.draft(bench.sequence("a"), bench.sequence("b")) == [0, LENGTH]
    assert drafter.calls[-1] == ("propose", {"b": False})
    assert bench.value("dspark:drafter_failures_total") == 1


@pytest.mark.parametrize(
    "lengths", [fail, list, lambda: None, lambda: [-1], lambda: [LENGTH + 1], lambda: [float("nan")], lambda: ["x"]]
)
def test_a_planner_without_lengths_rests_after_three_steps(lengths: Callable[[], Any]) -> None:
    drafter = Drafter()
    bench = Bench(drafter, planner=StubPlanner(lengths=lengths), limits=RESTING)
    a = bench.sequence("a")
    for _ in range(3):
        assert bench.draft(a) == [LENGTH]  # that drafting goes well is no excuse for the planner
        assert bench.plan(a) == [0]

    num_calls = len(drafter.calls)
    assert bench.draft(a) == [0]
    assert bench.plan(a) == [0]
    assert len(drafter.calls) == num_calls
    assert bench.drafting.state == "open"


def test_more_than_the_budget_is_never_planned() -> None:
    bench = Bench(Drafter(), planner=StubPlanner())
    sequences = [bench.sequence(f"r{i}") for i in range(3)]
    bench.draft(*sequences)
    load = Load(num_decoding=3, num_prefill_tokens=0, max_tokens=11, context_len=0.0)

    assert bench.drafting.plan_lengths(sequences, load) == [0, 0, 0]
    assert bench.plan(*sequences) == [LENGTH] * 3


def test_a_planner_is_only_trusted_again_when_it_planned_for_drafts() -> None:
    planner = StubPlanner(lengths=fail)
    bench = Bench(Drafter(), planner=planner, limits=AT_ONCE)
    a = bench.sequence("a")
    for _ in range(3):
        bench.draft(a)
        bench.plan(a)
    planner.replaced = {}

    a.draft = NO_DRAFT
    assert bench.plan(a) == [0]
    assert bench.drafting.state == "probing"
    bench.draft(a)
    assert bench.plan(a) == [LENGTH]
    assert bench.drafting.state == "on"


def test_errors_where_planner_and_drafter_learn_or_forget_stay_there() -> None:
    drafter = Drafter()
    drafter.before = {"take_verdict": fail, "release": fail, "calibration_errors": fail}
    bench = Bench(drafter, planner=StubPlanner(observe_verdict=fail, release=fail))
    a = bench.sequence("a")
    for _ in range(ERRORS_SHOWN_EVERY):
        bench.drafting.take_verdict(a, Draft(token_ids=[1]), num_accepted=0, num_emitted=1)
    bench.drafting.release("a")

    assert drafter.count("calibration_errors") == 1
    assert bench.value("dspark:drafter_failures_total") == 2 * ERRORS_SHOWN_EVERY + 3


def test_verification_that_fails_three_times_ends_drafting_for_a_while() -> None:
    bench = Bench(Drafter(), limits=RESTING)
    a = bench.sequence("a")
    for _ in range(3):
        assert bench.draft(a) == [LENGTH]
        bench.drafting.take_verification(RuntimeError("down"))
    assert bench.draft(a) == [0]

    bench.drafting.take_verification(None)  # of drafts that were on the way
    assert bench.draft(a) == [LENGTH]


# -- by hand -------------------------------------------------------------------------------------------------------


def test_switched_off_by_hand_the_drafter_is_not_asked_and_no_page_is_taken() -> None:
    """J6: what an earlier draft needed is given back."""
    drafter = Drafter()
    bench = Bench(drafter, planner=StubPlanner())
    a = bench.sequence("a")
    bench.draft(a)
    assert len(a.page_ids) == 2
    num_calls, last_serial = len(drafter.calls), max(map(bench.allocator.serial, range(64)))
    bench.drafting.switch(False)

    assert bench.draft(a) == [0]
    assert len(a.page_ids) == 1
    assert (len(drafter.calls), max(map(bench.allocator.serial, range(64)))) == (num_calls, last_serial)
    assert bench.value("dspark:speculation_state", state="switched_off") == 1
    bench.take_features(a)  # still taken, so that drafting can go on at once
    bench.drafting.switch(True)
    assert bench.draft(a) == [LENGTH]


def test_a_short_pool_shortens_drafts_and_then_leaves_them_out() -> None:
    """H8"""
    bench = Bench(Drafter(), planner=StubPlanner(), num_pages=3)
    a, b = bench.sequence("a", 3), bench.sequence("b", 4)
    c = bench.sequence("c", 3)

    assert bench.draft(a, b, c) == [1, 0, 1]
    assert bench.value("dspark:drafts_declined_total", reason="no_room") == 1


@pytest.mark.parametrize("call", ["forecast", "propose", "take_features", "take_verdict", "release"])
def test_without_fallback_the_drafters_errors_are_the_steps(call: str) -> None:
    drafter = Drafter()
    drafter.before[call] = fail
    bench = Bench(drafter, planner=StubPlanner(), fallback="off")
    a = bench.sequence("a")

    with pytest.raises(RuntimeError, match="down"):
        bench.take_features(a)
        bench.draft(a)
        bench.drafting.take_verdict(a, Draft(token_ids=[1]), num_accepted=0, num_emitted=1)
        bench.drafting.release("a")


@pytest.mark.parametrize("call", ["choose", "lengths", "observe_verdict", "release"])
def test_without_fallback_the_planners_errors_are_the_steps(call: str) -> None:
    bench = Bench(Drafter(), planner=StubPlanner(**{call: fail}), fallback="off")
    a = bench.sequence("a")

    with pytest.raises(RuntimeError, match="down"):
        bench.draft(a)
        bench.plan(a)
        bench.drafting.take_verdict(a, Draft(token_ids=[1]), num_accepted=0, num_emitted=1)
        bench.drafting.release("a")


def test_without_fallback_bad_drafts_are_errors_and_slow_ones_are_not() -> None:
    drafter = Drafter()
    bench = Bench(drafter, fallback="off", limits=FaultLimits(slow_at_least_s=0.0, slow_passes=0.0))
    a = bench.sequence("a")
    assert [bench.draft(a) for _ in range(5)] == [[LENGTH]] * 5
    drafter.bad = {"a"}

    with pytest.raises(ValueError, match="leave the vocabulary"):
        bench.draft(a)
    drafter.propose = lambda contexts: []  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="0 answers for 1 requests"):
        bench.draft(a)
