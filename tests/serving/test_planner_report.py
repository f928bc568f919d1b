"""What the planner decided, in words: every reason that the engine counts has some, and rounds add up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from toys import FunctionProposer, hashed_rule, make_engine, make_requests, perfect_proposer, run_requests

import dspark
from dspark.metrics import SPECULATION_STATES, EngineMetrics
from dspark.request import SamplingParams
from dspark.serving.live_stats import LiveStats
from dspark.serving.planner_report import REASONS, STATES, report, summary

RULE = hashed_rule(16)


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("m")


def lived(metrics: EngineMetrics, work) -> LiveStats:
    """Return figures of what `work` counts."""
    now_s = 0.0
    live = LiveStats(metrics, lambda: now_s)
    live.sample()
    work()
    now_s = 1.0
    live.sample()
    return live


def test_every_reason_that_the_engine_gives_has_words() -> None:
    """Reasons are written where they are counted: as arguments, dictionary keys and names of obstacles."""
    package = Path(dspark.__file__).parent
    source = "".join((package / name).read_text() for name in ("engine/drafting.py", "speculation/planner.py"))
    found = set(re.findall(r'count_declined\("(\w+)"|num_declined\["(\w+)"\]|return "(\w+)" if is_open', source))
    names = {name for groups in found for name in groups if name} | {"switched_off"}
    assert names == set(REASONS)


def test_every_state_of_drafting_has_words() -> None:
    assert set(STATES) == {*SPECULATION_STATES, "none"}


def test_each_round_is_told_with_what_became_of_it(metrics: EngineMetrics) -> None:
    def work() -> None:
        for _ in range(6):
            metrics.observe_round("ngram", num_verified=4, num_accepted=1, num_emitted=2)
        metrics.observe_plan(0, [0.5])
        metrics.count_declined("not_worth_it", 3)
        metrics.generation_tokens.inc(6 * 2 + 10)  # ten plain rounds

    live = lived(metrics, work)
    told = report(live, "on")
    counts = {outcome["name"]: (outcome["count"], outcome["share"]) for outcome in told["outcomes"] if outcome["count"]}
    assert counts == {
        "verified": (6, 0.375),
        "kept_back": (1, 0.0625),
        "not_worth_it": (3, 0.1875),
        "nothing_found": (6, 0.375),
    }
    assert told["summary"] == (
        "In the last 10 s, 38 % of the rounds verified a draft, 4.0 tokens long on average; a round gave 1.38 tokens. "
        "Most of the others: nothing to draft. Nothing held the request back, but there was nothing to propose: "
        "no earlier text repeats itself."
    )


def test_the_rounds_of_a_real_engine_add_up() -> None:
    """Nine tokens: the prefill's, then by rounds 3 drafted, 1 plain, 3 drafted and 1 plain, the last without room."""
    perfect = perfect_proposer(RULE)
    engine = make_engine(
        RULE,
        16,
        proposer=FunctionProposer(lambda c: perfect.propose([c])[0] if len(c.token_ids) in (4, 8) else []),
        num_draft_tokens=2,
    )
    requests = make_requests([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=9))
    told = report(lived(engine.metrics, lambda: run_requests(engine, requests)), "on")["outcomes"]
    assert {outcome["name"]: outcome["count"] for outcome in told if outcome["count"]} == {
        "verified": 2,
        "nothing_found": 1,
        "no_room": 1,
    }


def test_a_rare_reason_is_not_in_the_summary(metrics: EngineMetrics) -> None:
    def work() -> None:
        for _ in range(99):
            metrics.observe_round("ngram", num_verified=1, num_accepted=1, num_emitted=2)
        metrics.count_declined("no_room", 1)
        metrics.generation_tokens.inc(99 * 2 + 1)

    text = report(lived(metrics, work), "on")["summary"]
    assert text == (
        "In the last 10 s, 99 % of the rounds verified a draft, 1.0 tokens long on average; a round gave 1.99 tokens."
    )


@pytest.mark.parametrize("state", ["switched_off", "open", "probing", "none"])
def test_a_state_other_than_on_is_what_the_summary_says(metrics: EngineMetrics, state: str) -> None:
    assert summary(LiveStats(metrics).span(10), state) == STATES[state]


def test_an_idle_server_says_so(metrics: EngineMetrics) -> None:
    told = report(LiveStats(metrics), "on")
    assert told["summary"] == "Nothing is being decoded at the moment."
    assert {outcome["share"] for outcome in told["outcomes"]} == {0.0}
