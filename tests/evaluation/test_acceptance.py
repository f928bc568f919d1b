"""Served acceptance on toy targets whose rounds are known exactly."""

from __future__ import annotations

import pytest
from toys import cycle_rule, make_engine, right_until_proposer

from dspark.errors import ConfigError, DsparkError, RequestError
from dspark.evaluation.acceptance import ServedAcceptance, load_tasks, measure_served, serve_texts, to_json, total_of
from dspark.evaluation.serving_config import ServingConfig
from dspark.request import Request, SamplingParams

VOCAB = 10


RULE = cycle_rule(VOCAB, VOCAB)


def engine_with(num_right, **options):
    """Return an engine that counts up, and a drafter whose first `num_right` proposals are right."""
    proposer = right_until_proposer(RULE, VOCAB, num_right)
    return make_engine(RULE, VOCAB, proposer=proposer, num_draft_tokens=3, **options)


def serve(engine, max_tokens, prompts=((1, 2),), **sampling):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **sampling)
    return serve_texts(
        engine, [Request(request_id=str(i), prompt_token_ids=p, sampling=params) for i, p in enumerate(prompts)]
    )


def test_rounds_are_those_of_the_engine_one_by_one():
    """Ten tokens: one of the prefill, then 2 accepted of 3 and a bonus, thrice: 1 + 3 + 3 + 3."""
    (text,) = serve(engine_with(2), 10)
    assert text.token_ids == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert [(r.num_proposed, r.num_accepted, r.num_emitted) for r in text.rounds] == [(3, 2, 3), (3, 2, 3), (2, 2, 3)]
    measured = ServedAcceptance.of([text])
    assert measured.rounds.accepted_length == 3
    assert measured.rounds.reached == [3, 3, 2]
    assert measured.rounds.accepted == [3, 3, 0]
    assert measured.finish_reasons == {"length": 1}


def test_a_stop_inside_a_draft_ends_the_count_there():
    """4, 5, 6 are accepted and 5 ends the text."""
    (text,) = serve(engine_with(3), 10, stop_token_ids=(5,))
    assert text.token_ids == [3, 4, 5]
    rounds = ServedAcceptance.of([text]).rounds
    assert (rounds.num_rounds, rounds.num_emitted, rounds.reached, rounds.accepted) == (1, 2, [1, 1, 0], [1, 1, 0])


def test_plain_decoding_has_rounds_of_length_one_and_no_position():
    (text,) = serve(make_engine(RULE, VOCAB), 5)
    rounds = ServedAcceptance.of([text]).rounds
    assert (rounds.num_rounds, rounds.accepted_length, rounds.conditional_acceptance) == (4, 1, [])


def test_positions_are_those_the_engine_exports():
    engine = engine_with(1)
    texts = serve(engine, 14, prompts=[(n,) for n in range(6)])
    rounds = ServedAcceptance.of(texts).rounds
    exported = [
        engine.metrics.registry.get_sample_value(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total", {"model_name": "toy", "position": str(k)}
        )
        for k in range(3)
    ]
    assert rounds.accepted == [exported[0], 0, 0]
    assert exported[1:] == [None, None]
    assert rounds.accepted[0] == 6 * 6


def test_each_task_is_counted_by_itself_and_all_together():
    engine, progress = engine_with(3), []
    serving = ServingConfig(temperatures=(0.0, 1.0), max_tokens=9)
    tasks = {"a": [[1]], "b": [[2], [3, 4]]}
    results = measure_served(engine, tasks, serving, progress=lambda *numbers: progress.append(numbers))
    assert results.keys() == {"0", "1"}
    assert {name: one.rounds.num_texts for name, one in results["1"].items()} == {"a": 1, "b": 2}
    total = total_of(results["0"])
    assert total.rounds.num_emitted == 3 * 8
    assert total.finish_reasons == {"length": 3}
    assert total.stats.num_emitted == 24
    assert progress[-1] == (6, 6)
    numbers = to_json(results)["0"]
    assert numbers["all"]["accepted_length"] == 4
    assert numbers["tasks"]["b"]["num_drafted"] == numbers["tasks"]["b"]["num_verified"] == 12
    assert numbers["tasks"]["b"]["finish_reasons"] == {"length": 2}


@pytest.mark.parametrize(("seed", "expected"), [(5, [5, 6, 5, 6]), (None, [None] * 4)])
def test_each_request_gets_a_seed_of_its_own_or_none(seed, expected, monkeypatch):
    engine = engine_with(3)
    add, seeds = engine.add_request, []
    monkeypatch.setattr(engine, "add_request", lambda request: (seeds.append(request.sampling.seed), add(request)))
    measure_served(engine, {"a": [[1], [2]]}, ServingConfig(max_tokens=2, seed=seed))
    assert seeds == expected


def test_ctrl_c_leaves_the_engine_empty():
    engine = engine_with(3)

    def stop(done):
        raise KeyboardInterrupt

    params = SamplingParams(temperature=0, max_tokens=50)
    with pytest.raises(KeyboardInterrupt):
        serve_texts(engine, [Request(request_id="a", prompt_token_ids=[1], sampling=params)], progress=stop)
    assert not engine.has_unfinished()
    assert engine.allocator.num_used == 0


def test_a_prompt_that_does_not_fit_is_named(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt_ids": [1]}\n{"prompt_ids": [' + "1," * 100 + "1]}\n")
    with pytest.raises(DsparkError, match=r"long\.jsonl, prompt 2: the prompt has 101 tokens and max_tokens is 128"):
        load_tasks([str(path)], engine_with(1, max_model_len=200), ServingConfig())
    tasks = load_tasks([str(path)], engine_with(1, max_model_len=200), ServingConfig(num_prompts=1))
    assert tasks == {str(path): [[1]]}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_tokens": 0}, ConfigError, r"max_tokens \(0\) must be at least 1"),
        ({"num_prompts": 0}, ConfigError, r"num_prompts \(0\) must be at least 1"),
        ({"concurrency": 0}, ConfigError, r"concurrency \(0\) must be at least 1"),
        ({"temperatures": ()}, ConfigError, "temperatures is empty"),
        ({"temperatures": (1.0, 1.0)}, ConfigError, "holds one twice"),
        ({"temperatures": (-1.0,)}, RequestError, r"temperature \(-1\.0\)"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        ServingConfig(**settings)
