"""Measuring a machine: what passes it runs, within which time, and that nothing is left behind."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import pytest
import torch
from drafter_cases import tiny_target
from dspark_bench import VOCAB, engine_over, make_drafter
from toys import make_requests, run_requests

from dspark.batch import BatchRow
from dspark.engine.bandwidth import context_bytes, measure_peak_bytes_per_s
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.profile_rows import ProfileLimits, ProfileRows
from dspark.engine.profiler import measure_draft_times, measure_times, warm_up_passes
from dspark.engine.runner import Runner
from dspark.request import SamplingParams
from dspark.speculation.combined import CombinedProposer
from dspark.speculation.draft_model import DraftModelProposer
from dspark.speculation.dspark_drafter import DSparkProposer
from dspark.speculation.ngram import NgramProposer
from dspark.speculation.proposal import NO_DRAFT, CommittedFeatures, Draft, DraftContext, Proposer

LIMITS = ProfileLimits(
    max_batch_tokens=256, max_size=64, max_model_len=2048, num_pages=4096, page_size=16, num_draft_tokens=5
)
TINY = ProfileLimits(max_batch_tokens=32, max_size=6, max_model_len=128, num_pages=64, page_size=4, num_draft_tokens=4)


class Machine:
    """A clock that target passes move on: some seconds for a pass, more for tokens and their context."""

    def __init__(self, *, fixed_s=0.010, token_s=0.001, context_s=0.0, draft_s=0.002) -> None:
        self.now = 0.0
        self.fixed_s, self.token_s, self.context_s, self.draft_s = fixed_s, token_s, context_s, draft_s
        self.passes: list[Sequence[BatchRow]] = []

    def clock(self) -> float:
        return self.now

    def execute(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        self.passes.append(rows)
        num_tokens = sum(len(row.token_ids) for row in rows)
        self.now += self.fixed_s + self.token_s * num_tokens
        self.now += self.context_s * sum(row.start_position for row in rows)
        return torch.zeros(num_tokens, 2)

    def committed_features(self, num_committed: Sequence[int]) -> CommittedFeatures:
        nothing = torch.zeros(0)
        return CommittedFeatures(features=nothing, positions=nothing, slot_mapping=nothing, new_page_ids=nothing)


class TimedProposer(Proposer):
    """Takes time for each request, and remembers what it was told."""

    name = "timed"
    has_pass = True

    def __init__(self, machine: Machine, *, num_empty_calls: int = 0) -> None:
        self.machine = machine
        self.num_empty_calls = num_empty_calls
        self.released: set[str] = set()
        self.seen: set[str] = set()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.machine.now += 0.004 + self.machine.draft_s * len(contexts)
        self.seen |= {context.request_id for context in contexts}
        self.num_empty_calls -= 1
        return [NO_DRAFT if self.num_empty_calls >= 0 else Draft(token_ids=[1]) for _ in contexts]

    def take_verdict(self, request_id: str, draft: Draft, num_accepted: int) -> None:
        raise AssertionError("nothing was verified")

    def release(self, request_id: str) -> None:
        self.released.add(request_id)


def measure(machine: Machine, proposer: Proposer | None = None, limits: ProfileLimits = LIMITS, **more):
    return measure_times(machine, proposer, limits=limits, clock=machine.clock, **more)


# -- what is measured ----------------------------------------------------------------------------------------------


def test_the_curves_are_the_machines_times():
    machine = Machine(context_s=1e-6)
    measured = measure(machine, TimedProposer(machine))
    assert measured.target.sizes[:10] == (1, 2, 3, 4, 5, 6, 7, 8, 9, 12)
    assert (measured.target.sizes[-1], measured.max_tokens) == (256, 256)
    assert (measured.context_len, measured.long_context_len) == (120, 1016)
    assert measured.long_target is not None
    for size, seconds, long_s in zip(
        measured.target.sizes, measured.target.seconds, measured.long_target.seconds, strict=True
    ):
        num_rows = min(64, 1 + math.ceil(max(0, size - 6) / 1.5))
        assert seconds == pytest.approx(0.010 + 0.001 * size + 120e-6 * num_rows)
        # Between the sizes measured the longer context's share is interpolated, by rows.
        assert long_s == pytest.approx(seconds + 896e-6 * num_rows, abs=1e-9)
    assert measured.draft is not None
    assert measured.draft.sizes == (1, 2, 4, 8, 16, 32, 64)
    assert measured.draft.seconds == pytest.approx([0.004 + 0.002 * size for size in measured.draft.sizes])


def test_rows_are_those_of_decoding_each_with_pages_of_its_own_to_write():
    """One request with a full draft, or more requests with half a drafted token each."""
    (alone,) = ProfileRows(LIMITS, num_pages=384).decoding(6, 136) or []
    assert len(alone.token_ids) == 6
    rows = ProfileRows(LIMITS, num_pages=384).decoding(33, 136)
    assert rows is not None
    assert [len(row.token_ids) for row in rows] == [2] * 14 + [1] * 5
    assert all((row.num_logits, row.start_position) == (len(row.token_ids), 136) for row in rows)
    assert all(len(row.page_ids) == 9 for row in rows)
    pages = [page for row in rows for page in row.page_ids]
    assert len(set(pages)) == len(pages)


def test_where_pages_are_few_contexts_are_shared_and_never_written():
    rows = ProfileRows(LIMITS, num_pages=80).decoding(48, 1032)
    assert rows is not None
    written = [row.page_ids[-1] for row in rows]
    assert len(set(written)) == 29
    assert {page for row in rows for page in row.page_ids[:-1]} == set(range(80)) - set(written)


def test_more_tokens_than_rows_of_drafts_hold_make_longer_rows():
    limits = ProfileLimits(
        max_batch_tokens=64, max_size=2, max_model_len=512, num_pages=64, page_size=16, num_draft_tokens=5
    )
    rows = ProfileRows(limits, num_pages=64).decoding(64, 136)
    assert rows is not None
    assert [len(row.token_ids) for row in rows] == [32, 32]


@pytest.mark.parametrize(
    ("max_model_len", "num_pages", "page_size"), [(2, 1, 16), (16, 1, 16), (40, 3, 16), (33, 33, 1), (300, 2, 256)]
)
def test_a_tiny_cache_is_measured_as_far_as_it_goes(max_model_len, num_pages, page_size):
    limits = ProfileLimits(
        max_batch_tokens=256, max_size=64, max_model_len=max_model_len, num_pages=num_pages, page_size=page_size,
        num_draft_tokens=5,
    )  # fmt: skip
    machine = Machine()
    measured = measure(machine, None, limits)
    assert measured.target.sizes[:2] == (1, 2)
    for rows in machine.passes:
        for row in rows:
            end = row.start_position + len(row.token_ids)
            assert end <= max_model_len
            assert len(row.page_ids) * page_size >= end
            assert set(row.page_ids) <= set(range(num_pages))


def test_only_what_is_within_the_token_budget_is_measured():
    machine = Machine()
    assert measure(machine, None, TINY).target.sizes == (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32)
    assert max(sum(len(row.token_ids) for row in rows) for rows in machine.passes) == 32


def test_ngram_and_plain_decoding_have_no_pass_to_measure():
    assert measure(Machine(), NgramProposer()).draft is None
    assert measure(Machine(), None).draft is None


def test_a_drafter_without_a_length_is_not_measured():
    machine = Machine()
    limits = ProfileLimits(
        max_batch_tokens=32, max_size=6, max_model_len=128, num_pages=64, page_size=4, num_draft_tokens=0
    )
    proposer = TimedProposer(machine)
    assert measure(machine, proposer, limits).draft is None
    assert not proposer.seen


# -- the time it takes ---------------------------------------------------------------------------------------------


def test_a_fast_machine_is_done_long_before_the_budget_ends():
    machine = Machine(fixed_s=1e-4, token_s=1e-6)
    measure(machine)
    assert machine.now < 0.1


def test_the_embedded_model_keeps_the_budget_with_all_sizes(caplog):
    """About as fast as two cores: 30 ms a pass and 1.3 ms a token, contexts and drafts on top."""
    machine = Machine(fixed_s=0.030, token_s=0.0013, context_s=3e-6, draft_s=0.001)
    measured = measure(machine, TimedProposer(machine))
    assert machine.now < 12.5
    assert (len(measured.target.sizes), measured.target.sizes[-1]) == (20, 256)
    assert "left out" not in caplog.text


def test_a_slow_machine_measures_few_sizes_far_apart_and_says_so(caplog):
    """0.3 s a pass: a whole round of all sizes would take 20 s."""
    machine = Machine(fixed_s=0.300, token_s=0.010)
    measured = measure(machine, TimedProposer(machine))
    assert machine.now < 14.0
    assert {1, 8, 32} <= set(measured.target.sizes)
    assert 256 not in measured.target.sizes
    assert measured.draft is not None
    assert "measuring this machine left out what did not fit into 12 s" in caplog.text
    assert "target of 256 tokens" in caplog.text


def test_two_sizes_are_measured_at_any_cost():
    measured = measure(Machine(fixed_s=5.0, token_s=0.1))
    assert measured.target.sizes == (1, 8)
    assert measured.long_target is None
    assert (measured.context_len, measured.long_context_len) == (0, 0)


def test_a_machine_that_becomes_slow_while_it_is_measured_keeps_the_sizes_it_can(caplog):
    machine = Machine(fixed_s=0.030, token_s=0.0013)

    class Slowing(Machine):
        def execute(self, rows):
            if self.now > 4.0:
                self.fixed_s, self.token_s = 0.200, 0.010
            return super().execute(rows)

    machine = Slowing(fixed_s=0.030, token_s=0.0013)
    measured = measure(machine)
    assert machine.now < 16.0
    assert {1, 8} <= set(measured.target.sizes)
    assert 256 not in measured.target.sizes
    assert "left out" in caplog.text


def test_a_slow_moment_hits_no_point_more_than_once():
    """Sizes are timed in turn: 0.2 s of another program's load fall on different sizes, and medians forget them."""

    class Disturbed(Machine):
        def execute(self, rows):
            logits = super().execute(rows)
            if 2.0 < self.now < 2.2:
                self.now += 0.05
            return logits

    machine = Disturbed()
    measured = measure(machine)
    assert measured.target.seconds == pytest.approx([0.010 + 0.001 * size for size in measured.target.sizes])


def test_progress_goes_up_to_the_whole():
    shares: list[float] = []
    measure(Machine(), progress=shares.append)
    assert shares == sorted(shares)
    assert (0.0 < shares[0] < 0.2, shares[-1]) == (True, 1.0)


# -- drafters ------------------------------------------------------------------------------------------------------


def test_a_draft_model_reads_its_texts_before_it_is_timed():
    machine = Machine()
    measured = measure(machine, TimedProposer(machine, num_empty_calls=5))
    assert measured.draft is not None
    assert measured.draft.seconds[0] == pytest.approx(0.006)


def test_all_requests_that_were_made_up_are_released():
    machine = Machine()
    proposer = TimedProposer(machine)
    measure(machine, proposer)
    assert len(proposer.seen) == 64
    assert proposer.released == proposer.seen


@pytest.mark.parametrize("is_silent", [True, False])
def test_a_drafter_that_fails_costs_its_times_and_not_the_start(is_silent, caplog):
    class Broken(TimedProposer):
        def propose(self, contexts):
            super().propose(contexts)
            if is_silent:
                return [NO_DRAFT] * len(contexts)
            raise RuntimeError("broken")

    machine = Machine()
    proposer = Broken(machine)
    with caplog.at_level(logging.WARNING):
        measured = measure(machine, proposer)
    assert measured.draft is None
    assert len(measured.target.sizes) == 20
    assert proposer.released == proposer.seen == {"profile:0"}
    assert ("drafts nothing" if is_silent else "failed while it was measured") in caplog.text


def test_the_hand_over_of_features_counts_with_the_target_pass():
    class Tapping(TimedProposer):
        tapped_layers = (1,)

        def take_features(self, committed):
            self.machine.now += 0.005

    machine = Machine()
    seconds = measure(machine, Tapping(machine)).target.seconds
    assert seconds[0] == pytest.approx(0.010 + 0.001 + 0.005)


def test_a_drafter_that_takes_no_features_is_left_out_of_the_target_pass(caplog):
    class Refusing(TimedProposer):
        tapped_layers = (1,)

        def take_features(self, committed):
            raise RuntimeError("broken")

    machine = Machine()
    assert measure(machine, Refusing(machine)).target.seconds[0] == pytest.approx(0.011)
    assert caplog.text.count("failed to take features") == 1


def test_drafting_passes_can_be_measured_alone():
    machine = Machine()
    curve = measure_draft_times(machine, TimedProposer(machine), limits=LIMITS, clock=machine.clock)
    assert curve is not None
    assert curve.seconds[0] == pytest.approx(0.006)
    assert all(row.start_position == 0 for rows in machine.passes for row in rows)  # pages touched, nothing else
    assert measure_draft_times(machine, NgramProposer(), limits=LIMITS, clock=machine.clock) is None


# -- warming up ----------------------------------------------------------------------------------------------------


def test_a_warm_up_runs_a_few_sizes_and_a_drafting_pass_once():
    machine = Machine()
    proposer = TimedProposer(machine)
    warm_up_passes(machine, proposer, limits=LIMITS, clock=machine.clock)
    sizes = [sum(len(row.token_ids) for row in rows) for rows in machine.passes if rows[0].start_position > 0]
    assert sizes == [1, 6, 16, 64, 256]
    assert proposer.seen == proposer.released == {"profile:0"}
    pages = {page for rows in machine.passes for row in rows for page in row.page_ids}
    assert max(pages) < 64
    assert machine.now < 1.5


def test_a_slow_machine_warms_up_with_what_fits_its_budget():
    machine = Machine(fixed_s=0.4, token_s=0.01)
    proposer = TimedProposer(machine)
    warm_up_passes(machine, proposer, limits=LIMITS, clock=machine.clock)
    assert [sum(len(row.token_ids) for row in rows) for rows in machine.passes] == [16, 1]  # pages touched, one token
    assert proposer.seen == {"profile:0"}
    assert machine.now < 1.5


def test_a_pass_beyond_the_budget_is_the_only_one():
    machine = Machine(fixed_s=10.0)
    proposer = TimedProposer(machine)
    warm_up_passes(machine, proposer, limits=LIMITS, clock=machine.clock)
    assert len(machine.passes) == 2
    assert proposer.seen == set()


def test_a_drafter_that_fails_does_not_hold_up_the_warm_up(caplog):
    class Failing(TimedProposer):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
            raise RuntimeError("broken")

    machine = Machine()
    warm_up_passes(machine, Failing(machine), limits=LIMITS, clock=machine.clock)
    assert sum(len(row.token_ids) for row in machine.passes[-1]) == 256
    assert "the timed drafter failed" in caplog.text


# -- a real model --------------------------------------------------------------------------------------------------


def tiny_runner(proposer: Proposer | None) -> Runner:
    taps = () if proposer is None else proposer.tapped_layers
    return Runner(tiny_target(), num_pages=TINY.num_pages, page_size=TINY.page_size, tapped_layers=taps)


def test_measuring_and_warming_up_leave_no_trace_in_later_answers_and_drafts():
    """The same requests on a fresh engine and on those whose pools and drafter were measured with, or warmed up."""
    prompts, params = [[5, 6, 7, 8, 9], [100] * 9], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    answers = []
    for before_requests in ("nothing", "measured", "warmed up"):
        proposer = CombinedProposer(DSparkProposer(make_drafter(), num_pages=64, page_size=4))
        engine = engine_over(proposer)
        before = proposer.export_state()
        if before_requests == "warmed up":
            warm_up_passes(engine.runner, proposer, limits=TINY)
        if before_requests == "measured":
            measured = measure_times(engine.runner, proposer, limits=TINY, budget_s=0.5)
            assert measured.draft is not None
            assert measured.draft.sizes == (1, 2, 4)
            assert measured.long_context_len > measured.context_len > 0
        assert proposer.export_state() == before
        assert proposer.num_requests == 0
        assert engine.allocator.num_used == engine.allocator.num_cached == 0
        transcripts = run_requests(engine, make_requests(prompts, params))
        answers.append([(t.token_ids, t.last.speculation) for t in transcripts.values()])
    assert answers[0] == answers[1] == answers[2]


def test_a_draft_model_takes_no_page_for_known_after_it_was_measured():
    """Pages were filled under a serial that no allocator hands out."""
    runner = tiny_runner(None)
    proposer = DraftModelProposer(
        runner.execute, vocab_size=VOCAB, draft_vocab_size=VOCAB, max_model_len=512, num_pages=64, page_size=4,
        max_batch_tokens=32,
    )  # fmt: skip
    measured = measure_times(tiny_runner(None), proposer, limits=TINY, budget_s=0.5)
    assert measured.draft is not None
    assert proposer.num_requests == 0
    allocator = PageAllocator(64, 4)
    pages = allocator.allocate(64)
    assert pages is not None
    assert not {allocator.serial(page) for page in pages} & {s for s in proposer._filled_serials if s is not None}


# -- memory traffic ------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_pass_are_those_of_all_matrices():
    config = tiny_target().config
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (64, 6, 256)
    layer = sum(
        weight.numel()
        for weight in (
            torch.empty((config.num_heads + 2 * config.num_kv_heads) * config.head_dim, 64),
            torch.empty(64, config.num_heads * config.head_dim),
            torch.empty(2 * config.intermediate_size, 64),
            torch.empty(64, config.intermediate_size),
        )
    )
    assert tiny_target().num_weight_bytes == 4 * (6 * layer + 256 * 64)
    assert context_bytes(tiny_target(), 10) == 10 * 4 * 2 * 6 * config.num_kv_heads * config.head_dim


def test_the_peak_is_that_of_the_fastest_reading():
    times = iter([0.0, 0.0, 0.4, 0.4, 0.6])
    assert measure_peak_bytes_per_s(torch.device("cpu"), num_bytes=1000, clock=lambda: next(times)) == pytest.approx(
        1000 / 0.2
    )
