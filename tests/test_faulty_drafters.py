"""Faults of drafter, planner and verification under load: every request ends with the text of plain decoding."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dspark_bench import VOCAB as TINY_VOCAB
from dspark_bench import RecordingProposer, assert_drafts_are_fresh, engine_over, stored_drafter
from stated_proposer import StatedProposer
from toys import (
    ToyRunner,
    Transcript,
    drain,
    hashed_rule,
    make_engine,
    make_requests,
    perfect_proposer,
    random_prompts,
    run_requests,
    soft_proposer,
    step_once,
)

from dspark.batch import BatchRow
from dspark.engine.engine import Engine
from dspark.engine.guard import FaultLimits
from dspark.engine.runner import Runner
from dspark.request import Request, SamplingParams
from dspark.speculation.capacity import MeasuredTimes, StepTimes, TimeCurve
from dspark.speculation.combined import CombinedProposer
from dspark.speculation.fault_injection import Fault, FaultyProposer
from dspark.speculation.planner import Planner
from dspark.speculation.proposal import Proposer

VOCAB = 16
RULE = hashed_rule(VOCAB)
PROMPTS = random_prompts(32, VOCAB, high=24)
# Either kind of limit alone, and the others out of reach, whatever else the machine does.
PATIENT = FaultLimits(slow_at_least_s=1e6, hanging_at_least_s=1e6, first_pause_s=0.0)
SLOW = FaultLimits(slow_at_least_s=0.015, slow_passes=0.0, hanging_at_least_s=1e6, first_pause_s=0.02)
HANGING = FaultLimits(slow_at_least_s=1e6, hanging_at_least_s=0.04, hanging_passes=0.0, first_pause_s=0.02)


class Bursts:
    """Faults in bursts of random length with random pauses between, in calls of these names, until `end`."""

    def __init__(self, kinds: Sequence[Fault], *, seed: int = 0, calls: Sequence[str] = (), burst: int = 7) -> None:
        self._kinds, self._calls, self._burst = list(kinds), calls, burst
        self._random = random.Random(seed)
        self._left, self._is_bad = 5, False
        self._has_ended = False

    def end(self) -> None:
        self._has_ended = True

    def __call__(self, call: str) -> Fault | None:
        if self._has_ended or (self._calls and call not in self._calls):
            return None
        if self._left == 0:
            self._is_bad = not self._is_bad
            self._left = self._random.randint(2, self._burst)
        self._left -= 1
        return self._random.choice(self._kinds) if self._is_bad else None


def sample(engine: Engine, name: str, **labels: str) -> float:
    return engine.metrics.registry.get_sample_value(name, {"model_name": "toy", **labels}) or 0.0


def mixed_params(max_tokens: int = 24) -> list[SamplingParams]:
    """Greedy and seeded requests in turn."""
    return [
        SamplingParams(temperature=(0.0, 1.0, 0.7)[i % 3], seed=50 + i, max_tokens=max_tokens)
        for i in range(len(PROMPTS))
    ]


def serve(engine: Engine, requests: Sequence[Request], *, seed: int = 1) -> dict[str, Transcript]:
    """Serve requests that come in groups, and strangers that come and are aborted."""
    generator = random.Random(seed)
    transcripts = {request.request_id: Transcript() for request in requests}
    waiting = list(requests)
    strangers = make_requests(PROMPTS[:6], SamplingParams(temperature=0, max_tokens=40), prefix="stranger")
    transcripts |= {request.request_id: Transcript() for request in strangers}
    while waiting:
        for request in waiting[:4]:
            engine.add_request(request)
        del waiting[:4]
        stranger = strangers.pop() if strangers else None
        if stranger is not None:
            engine.add_request(stranger)
        for _ in range(generator.randint(1, 4)):
            step_once(engine, transcripts)
        if stranger is not None:
            engine.abort(stranger.request_id)
    drain(engine, transcripts)
    return transcripts


@pytest.fixture(scope="module")
def plain_texts() -> list[list[int]]:
    requests = make_requests(PROMPTS, mixed_params())
    return [run_requests(make_engine(RULE, VOCAB), [request])[request.request_id].token_ids for request in requests]


def with_pass(inner: Proposer) -> Proposer:
    """Let a toy drafter beside n-gram be one with a pass."""
    return CombinedProposer(StatedProposer(inner, lambda context: 0.9))


def recover(engine: Engine) -> None:
    """Serve requests without faults until drafting is trusted again."""
    deadline = time.monotonic() + 20.0
    while engine.drafting.state != "on":
        assert time.monotonic() < deadline, f"drafting stays {engine.drafting.state}"
        run_requests(engine, make_requests(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=8)))
        time.sleep(0.01)


# -- drafters that fail under a load of 16 ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["raise", "hang", "slow", "nan", "wrong_ids"])
@pytest.mark.parametrize("has_pass", [False, True])
def test_a_drafter_that_fails_at_random_moments_changes_no_text(
    kind: Fault, has_pass: bool, plain_texts: list[list[int]]
) -> None:
    """H7, H9, H11: in a small pool, with aborts and preemption; afterwards drafting works again."""
    faults = Bursts([kind], burst=5 if kind == "hang" else 9)
    inner = soft_proposer(RULE, VOCAB)
    proposer = FaultyProposer(with_pass(inner) if has_pass else inner, faults, hang_s=0.08, slow_s=0.02)
    engine = make_engine(
        RULE, VOCAB, proposer=proposer, num_pages=120, max_batch_size=16, max_batch_tokens=96, max_model_len=80,
        fault_limits={"hang": HANGING, "slow": SLOW}.get(kind, PATIENT),
    )  # fmt: skip
    for wave in range(8):
        requests = make_requests(PROMPTS, mixed_params(), prefix=f"wave{wave}-")
        transcripts = serve(engine, requests, seed=wave)
        assert [transcripts[request.request_id].token_ids for request in requests] == plain_texts
        if proposer.num_faults[kind] > 2:
            break

    assert proposer.num_faults[kind] > 2
    assert sample(engine, "dspark:drafter_failures_total") > 1
    assert sample(engine, "dspark:breaker_changes_total", to="open") >= 1

    faults.end()
    recover(engine)
    assert sample(engine, "dspark:breaker_changes_total", to="closed") >= 1
    assert sample(engine, "dspark:speculation_state", state="on") == 1
    accepted = sample(engine, "vllm:spec_decode_num_accepted_tokens_total")
    run_requests(engine, make_requests(PROMPTS[:4], SamplingParams(temperature=0, max_tokens=12)))
    assert sample(engine, "vllm:spec_decode_num_accepted_tokens_total") > accepted


def test_a_drafter_that_never_comes_back_costs_one_wait(plain_texts: list[list[int]]) -> None:
    proposer = FaultyProposer(
        perfect_proposer(RULE), lambda call: "hang" if proposer.num_calls[call] == 5 else None, hang_s=5.0
    )
    engine = make_engine(RULE, VOCAB, proposer=proposer, num_pages=256, max_batch_size=16, fault_limits=HANGING)
    start = time.monotonic()
    transcripts = run_requests(engine, make_requests(PROMPTS, mixed_params()))

    assert time.monotonic() - start < 5.0
    assert [transcripts[f"r{i}"].token_ids for i in range(len(PROMPTS))] == plain_texts
    assert proposer.num_calls["propose"] == 5
    assert sample(engine, "dspark:speculation_state", state="open") == 1


# -- the same with a DSpark drafter, whose context must have no hole ---------------------------------------------------

TINY_PROMPTS = random_prompts(16, TINY_VOCAB, low=3, high=37, seed=3)
TINY_GREEDY = SamplingParams(temperature=0, max_tokens=14)


@pytest.fixture(scope="module")
def tiny_texts() -> list[list[int]]:
    requests = make_requests(TINY_PROMPTS, TINY_GREEDY)
    return [run_requests(engine_over(None), [request])[request.request_id].token_ids for request in requests]


class KindProposer(RecordingProposer):
    """Drafts of a random drafter, corrected to be right now and then, so that they are accepted."""

    def __init__(self, texts: list[list[int]], seed: int = 0) -> None:
        generator = np.random.default_rng(seed)

        def correct(context: Any, draft: Any) -> Any:
            text = list(context.token_ids)
            index = next(i for i, prompt in enumerate(TINY_PROMPTS) if text[: len(prompt)] == prompt)
            right = texts[index][len(text) - len(TINY_PROMPTS[index]) :]
            num_right = min(int(generator.integers(0, len(draft.token_ids) + 1)), len(right))
            return type(draft)(token_ids=[*right[:num_right], *draft.token_ids[num_right:]])

        super().__init__(stored_drafter("deepspec_gated"), num_pages=256, correct=correct)


@pytest.mark.parametrize("kinds", [["raise"], ["hang"], ["raise", "nan", "wrong_ids"]])
def test_a_dspark_drafter_that_loses_features_drafts_only_where_its_context_is_whole(
    kinds: list[Fault], tiny_texts: list[list[int]]
) -> None:
    """H2, H6: every draft it makes after faults is that of a fresh run, also of those who inherit pages."""
    inner = KindProposer(tiny_texts)
    calls = ("take_features",) if kinds == ["hang"] else ()
    faults = Bursts(kinds, seed=2, calls=calls, burst=4)
    proposer = FaultyProposer(inner, faults, hang_s=0.1)
    limits = FaultLimits(slow_at_least_s=1e6, hanging_at_least_s=0.05 if kinds == ["hang"] else 1e6, first_pause_s=0.0)
    engine = engine_over(proposer, num_pages=256, max_batch_size=16, max_batch_tokens=64, fault_limits=limits)

    def serve_wave(wave: int) -> None:
        requests = make_requests(TINY_PROMPTS, TINY_GREEDY, prefix=f"wave{wave}-")
        transcripts = run_requests(engine, requests)
        assert [transcripts[request.request_id].token_ids for request in requests] == tiny_texts

    # A call that hangs keeps the drafter away for a while, in which a fast machine serves a whole wave.
    waves = itertools.count()
    while (wave := next(waves)) < 2 or (wave < 50 and sum(proposer.num_faults.values()) <= 2):
        serve_wave(wave)
    faults.end()
    time.sleep(0.12)
    serve_wave(wave)

    assert sum(proposer.num_faults.values()) > 2
    assert engine.drafting.state == "on"
    assert sample(engine, "vllm:spec_decode_num_accepted_tokens_total") > 0
    assert assert_drafts_are_fresh(inner) > 20


# -- verification that fails -----------------------------------------------------------------------------------------


class FailingRunner(ToyRunner):
    """Raises in chosen passes that verify drafts, before or after they wrote their tokens into the pool."""

    def __init__(self, *, fails: Any, is_late: bool, is_always: bool = False) -> None:
        super().__init__(RULE, VOCAB, num_pages=256, page_size=4)
        self.fails, self.is_late, self.is_always = fails, is_late, is_always
        self.num_failed = 0

    def execute(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        has_drafts = any(row.num_logits > 1 for row in rows) or self.is_always
        fails = has_drafts and self.fails(self.num_passes)
        if not fails or self.is_late:
            logits = super().execute(rows)
        if fails:
            self.num_failed += 1
            raise RuntimeError("the verification kernel failed")
        return logits


@pytest.mark.parametrize("is_late", [False, True])
def test_a_verification_step_that_fails_is_run_again_plainly(is_late: bool, plain_texts: list[list[int]]) -> None:
    generator = random.Random(5)
    runner = FailingRunner(fails=lambda num_passes: generator.random() < 0.3, is_late=is_late)
    engine = make_engine(
        RULE, VOCAB, proposer=perfect_proposer(RULE), num_pages=256, max_batch_size=16, runner=runner,
        fault_limits=PATIENT,
    )  # fmt: skip
    transcripts = run_requests(engine, make_requests(PROMPTS, mixed_params()))

    assert [transcripts[f"r{i}"].token_ids for i in range(len(PROMPTS))] == plain_texts
    assert sample(engine, "dspark:plain_retries_total") == runner.num_failed > 3
    for transcript in transcripts.values():
        stats = transcript.last.speculation
        assert stats.num_emitted == stats.num_accepted + stats.num_rounds == len(transcript.token_ids) - 1
        assert stats.num_verified <= stats.num_drafted


def test_verification_that_always_fails_ends_drafting_and_not_decoding(plain_texts: list[list[int]]) -> None:
    runner = FailingRunner(fails=lambda num_passes: True, is_late=False)
    limits = FaultLimits(slow_at_least_s=1e6, hanging_at_least_s=1e6, first_pause_s=1e6)
    engine = make_engine(
        RULE, VOCAB, proposer=perfect_proposer(RULE), num_pages=256, max_batch_size=16, runner=runner,
        fault_limits=limits,
    )  # fmt: skip
    transcripts = run_requests(engine, make_requests(PROMPTS, mixed_params()))

    assert [transcripts[f"r{i}"].token_ids for i in range(len(PROMPTS))] == plain_texts
    assert runner.num_failed == sample(engine, "dspark:plain_retries_total") == 3
    assert engine.drafting.state == "open"


def test_a_target_that_fails_without_drafts_too_is_the_steps_error() -> None:
    runner = FailingRunner(fails=lambda num_passes: num_passes > 3, is_late=False, is_always=True)
    engine = make_engine(RULE, VOCAB, proposer=perfect_proposer(RULE), runner=runner, fault_limits=PATIENT)
    (request,) = make_requests([[1, 2]], SamplingParams(temperature=0, max_tokens=60))
    engine.add_request(request)

    with pytest.raises(RuntimeError, match="the verification kernel failed"):
        for _ in range(20):
            engine.step()
    assert engine.drafting.state == "on"  # drafts are not to blame
    engine.abort(request.request_id)
    engine.check_integrity()
    assert engine.allocator.num_used == 0


def test_without_fallback_a_failing_verification_is_the_steps_error() -> None:
    runner = FailingRunner(fails=lambda num_passes: True, is_late=False)
    engine = make_engine(RULE, VOCAB, proposer=perfect_proposer(RULE), runner=runner, fallback_strategy="off")
    engine.add_request(make_requests([[1, 2]], SamplingParams(temperature=0, max_tokens=60))[0])

    with pytest.raises(RuntimeError, match="the verification kernel failed"):
        for _ in range(5):
            engine.step()
    assert runner.num_failed == 1


class FailingTinyRunner(Runner):
    """Raises in every third pass that verifies drafts, after it wrote all keys and values."""

    def execute(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        logits = super().execute(rows)
        self.num_verifying = getattr(self, "num_verifying", 0) + any(row.num_logits > 1 for row in rows)
        if any(row.num_logits > 1 for row in rows) and self.num_verifying % 3 == 0:
            raise RuntimeError("the verification kernel failed")
        return logits


def test_after_a_failed_verification_the_drafters_context_is_that_of_the_second_try(
    tiny_texts: list[list[int]],
) -> None:
    """H6"""
    inner = KindProposer(tiny_texts)
    engine = engine_over(
        inner, num_pages=256, max_batch_size=16, max_batch_tokens=64, runner_type=FailingTinyRunner,
        fault_limits=PATIENT,
    )  # fmt: skip
    requests = make_requests(TINY_PROMPTS, TINY_GREEDY)
    transcripts = run_requests(engine, requests)

    assert [transcripts[request.request_id].token_ids for request in requests] == tiny_texts
    assert sample(engine, "dspark:plain_retries_total") > 2
    assert assert_drafts_are_fresh(inner) > 20


# -- planners, hands -------------------------------------------------------------------------------------------------


class FailingPlanner(Planner):
    """Raises at random in everything it is asked."""

    def __init__(self, seed: int) -> None:
        times = StepTimes(MeasuredTimes(target=TimeCurve((1, 256), (0.01, 0.1)), max_tokens=256))
        super().__init__(scheduler="fixed", times=times, confidence_threshold=0.5, num_draft_tokens=5)
        self._random = random.Random(seed)
        self.num_failed = 0

    def _may_fail(self) -> None:
        if self._random.random() < 0.3:
            self.num_failed += 1
            raise RuntimeError("the planner failed")

    def choose(self, *args: Any) -> list[bool]:
        self._may_fail()
        return super().choose(*args)

    def lengths(self, *args: Any) -> list[int]:
        self._may_fail()
        return super().lengths(*args)

    def observe_verdict(self, *args: Any) -> None:
        self._may_fail()
        super().observe_verdict(*args)

    def observe_step(self, **values: Any) -> None:
        self._may_fail()
        super().observe_step(**values)

    def release(self, *args: Any) -> None:
        self._may_fail()
        super().release(*args)

    def step_s(self, *args: Any) -> float:
        self._may_fail()
        return super().step_s(*args)

    @property
    def predicted_step_s(self) -> float:
        self._may_fail()
        return super().predicted_step_s


def test_a_planner_that_fails_at_random_changes_no_text(plain_texts: list[list[int]]) -> None:
    planner = FailingPlanner(seed=4)
    proposer = StatedProposer(soft_proposer(RULE, VOCAB), lambda context: 0.9)
    engine = make_engine(
        RULE, VOCAB, proposer=with_pass(proposer), planner=planner, num_pages=256, max_batch_size=16,
        fault_limits=PATIENT,
    )  # fmt: skip
    transcripts = serve(engine, make_requests(PROMPTS, mixed_params()))

    assert [transcripts[f"r{i}"].token_ids for i in range(len(PROMPTS))] == plain_texts
    assert sample(engine, "dspark:drafter_failures_total") == planner.num_failed > 20


def test_speculation_switched_in_every_other_step_changes_no_text(plain_texts: list[list[int]]) -> None:
    engine = make_engine(RULE, VOCAB, proposer=with_pass(perfect_proposer(RULE)), num_pages=256, max_batch_size=16)
    requests = make_requests(PROMPTS, mixed_params())
    transcripts = {request.request_id: Transcript() for request in requests}
    for request in requests:
        engine.add_request(request)
    is_on = True
    while engine.has_unfinished():
        is_on = not is_on
        engine.switch_speculation(is_on)
        step_once(engine, transcripts)

    assert [transcripts[f"r{i}"].token_ids for i in range(len(PROMPTS))] == plain_texts
    assert engine.allocator.num_used == 0
    assert sample(engine, "dspark:drafts_declined_total", reason="switched_off") > 0


# -- J6 ------------------------------------------------------------------------------------------------------------


class ConstantRunner:
    """A target that always says the same."""

    def execute(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        logits = torch.zeros(sum(row.num_logits for row in rows), 4)
        logits[:, 1] = 1.0
        return logits

    def committed_features(self, num_committed: Sequence[int]) -> Any:
        raise AssertionError("nobody wants features")


class DecliningPlanner(Planner):
    """Lets nobody join."""

    def choose(self, request_ids: Sequence[str], forecasts: Any, load: Any) -> list[bool]:
        return [False] * len(request_ids)


@pytest.mark.parametrize("batch_size", [1, 8, 32])
@pytest.mark.parametrize("how", ["switched_off", "declined"])
def test_speculation_that_does_nothing_draws_nothing_and_takes_no_page_more(batch_size: int, how: str) -> None:
    """J6: 500 steps."""
    planner = DecliningPlanner(scheduler="fixed", times=None, confidence_threshold=0.5, num_draft_tokens=5)
    drafter = FaultyProposer(StatedProposer(perfect_proposer(RULE), lambda context: 0.9), lambda call: None)
    num_taken = []
    for proposer in (None, drafter):
        engine = make_engine(
            RULE, 4, proposer=proposer, planner=None if proposer is None else planner, runner=ConstantRunner(),
            num_pages=batch_size * 140, max_batch_size=batch_size, max_model_len=520, max_batch_tokens=128,
        )  # fmt: skip
        if how == "switched_off":
            engine.switch_speculation(False)
        prompts = [[i % 4, i // 4 % 4, i // 16] for i in range(batch_size)]
        params = SamplingParams(temperature=0, max_tokens=501)
        for request in make_requests(prompts, params):
            engine.add_request(request)
        for _ in range(501):
            engine.step()
        assert not engine.has_unfinished()
        num_taken.append(max(map(engine.allocator.serial, range(engine.allocator.num_pages))))

    assert num_taken[0] == num_taken[1] == batch_size * 126
    assert drafter.num_calls["propose"] == drafter.num_calls["begin"] == 0
    assert drafter.num_calls["forecast"] == (0 if how == "switched_off" else 499)
