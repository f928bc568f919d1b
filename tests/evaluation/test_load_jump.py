"""Jumps of the load on a tiny model: what is counted around them."""

from __future__ import annotations

import json

import pytest
from byte_tokenizers import byte_level_backend
from tiny_models import make_model

from dspark.cli import main
from dspark.config import EngineConfig, SpeculationConfig
from dspark.errors import ConfigError
from dspark.evaluation.load_jump import JumpConfig, StepCounts, run_jump, settled_after
from dspark.evaluation.prompts import PromptRecord

PROMPTS = [PromptRecord(prompt=text) for text in ("abcabcabc", "a longer prompt of other words", "x")]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    backend = byte_level_backend()
    make_model("llama", vocab_size=backend.get_vocab_size(), eos_token_id=None).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def report(model_folder):
    jump = JumpConfig(
        before=1,
        after=3,
        drafters=("none", str(model_folder)),
        max_tokens=13,
        repeats=2,
        num_steps_before=20,
        num_steps_after=30,
    )
    config = EngineConfig(model=str(model_folder), speculation=SpeculationConfig(scheduler="fixed", num_draft_tokens=3))
    return run_jump(config, jump, PROMPTS)


def test_steps_are_counted_before_the_jump_and_after_it(report):
    (run,) = report["runs"]  # nothing is to be seen of plain decoding
    before, after = run["steps"]["before"], run["steps"]["after"]
    assert (len(before), len(after)) == (20, 30)
    assert {step["num_steps"] for step in (*before, *after)} == {2}
    assert max(step["num_rounds"] for step in before) == 2  # one request in each of the two jumps
    assert max(step["num_rounds"] for step in after) == 6


def test_a_model_that_drafts_for_itself_verifies_and_accepts_all(report):
    """Each answer: a token from the prefill, then 12 in three rounds of 4."""
    (run,) = report["runs"]
    for level in (run["before"], run["after"]):
        assert (level["verified_length"], level["acceptance_rate"]) == (3.0, 1.0)
    assert (run["settled_after_steps"], run["acceptance_change_points"]) == (0, 0.0)


def test_nobody_waits_longer_than_a_step_while_all_fit(report):
    (run,) = report["runs"]
    assert run["longest_gap_steps"] == 1
    assert 1 <= run["all_decode_after_steps"] <= 3


def steps(lengths):
    return [StepCounts(num_steps=1, num_rounds=2, num_verified=2 * length) for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([2] * 40, 0),
        ([5] * 7 + [2] * 33, 7),  # from the eighth step on all windows hold nothing but 2
        ([2] * 5 + [5] * 3 + [2] * 32, 8),
        ([2, 4] * 20, 0),  # even and odd steps differ, ten in a row do not
    ],
)
def test_the_length_has_settled_when_it_stays_where_it_is_later(lengths, expected):
    assert settled_after(steps(lengths)) == expected


def test_steps_without_a_request_do_not_count():
    assert settled_after([StepCounts(num_steps=1)] * 3 + steps([2] * 37)) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"before": 4, "after": 4}, "cannot jump from 4 to 4"),
        ({"before": 0}, "cannot jump from 0 to 10"),
        ({"repeats": 0}, "repeats"),
        ({"num_steps_after": 19}, "are too few; measure at least 20"),
        ({"drafters": ("none",)}, "names none that verifies anything"),
    ],
)
def test_a_jump_that_shows_nothing_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        JumpConfig(**{"before": 2, "after": 10, **settings})


def test_the_verb_measures_a_jump_and_plot_draws_it(model_folder, tmp_path, capsys):
    argv = ["bench", "--model", str(model_folder), "--drafters", f"none,{model_folder}@2", "--jump", "1:2"]
    argv += ["--scheduler", "fixed", "--max-tokens", "8", "--repeats", "1", "--num-prompts", "3"]
    assert main([*argv, "--temperature", "0,1"]) == 0
    output = capsys.readouterr().out
    report = json.loads(output.splitlines()[-1])
    assert [(run["drafter"], run["temperature"]) for run in report["runs"]] == [
        (f"{model_folder}@2", 0.0),
        (f"{model_folder}@2", 1.0),
    ]
    assert report["settings"]["num_prompts"] == 3
    saved, plot = tmp_path / "jump.txt", tmp_path / "jump.svg"
    saved.write_text(output)
    assert main(["plot", str(saved), "--output", str(plot)]) == 0
    assert f"{model_folder.name}@2, T=1" in plot.read_text()
    assert str(model_folder) not in plot.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--concurrency", "4"], "--concurrency (4) does not go with --jump"),
        (["--compare-transformers"], "--compare-transformers (True) does not go with --jump"),
        (["--temperature", "warm"], "--temperature (warm) must be numbers separated by commas, such as 0,1"),
    ],
)
def test_flags_that_do_not_go_with_a_jump_are_refused(flags, message, capsys):
    assert main(["bench", "--jump", "2:10", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["2", "2:x", "2:3:4"])
def test_a_jump_is_two_numbers(text, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--jump", text])
    assert "invalid N:M value" in capsys.readouterr().err
