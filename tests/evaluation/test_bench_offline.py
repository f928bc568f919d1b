"""The offline benchmark on a tiny model: what it reports, not how fast this machine is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
from byte_tokenizers import byte_level_backend
from drafter_cases import FIXTURES, copy_checkpoint
from tiny_models import make_model
from toys import WordTokenizer

from dspark.cli import main
from dspark.config import EngineConfig, SpeculationConfig
from dspark.engine import build
from dspark.errors import ConfigError, DsparkError
from dspark.evaluation.bench_offline import BenchConfig, run_bench, turns
from dspark.evaluation.bench_report import summary
from dspark.evaluation.closed_loop import PassResult
from dspark.evaluation.prompts import PromptRecord
from dspark.models import shipped_drafters
from dspark.models.model_source import resolve_model
from dspark.request import SpeculationStats

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
    bench = BenchConfig(drafters=("none", "ngram", str(model_folder)), concurrency=(1, 2), max_tokens=12, repeats=2)
    lines = []
    config = EngineConfig(model=str(model_folder), speculation=SpeculationConfig(scheduler="fixed"))
    report = run_bench(config, bench, PROMPTS, progress=lines.append)
    return report | {"lines": lines}


def test_every_drafter_is_measured_at_every_concurrency_after_a_warm_up(report, model_folder):
    drafters = ("none", "ngram", str(model_folder))
    assert [(r["drafter"], r["concurrency"]) for r in report["runs"]] == [(d, c) for c in (1, 2) for d in drafters]
    assert [line.split(":")[0] for line in report["lines"]] == ["warm-up"] * 6 + ["repeat 1/2"] * 6 + ["repeat 2/2"] * 6


def test_each_run_reports_the_figures_people_compare(report):
    names = {"output_tokens_per_s", "tpot_ms_p50", "ttft_ms_p50", "accepted_length", "acceptance_rate"}
    for run in report["runs"]:
        assert names <= run.keys()
        assert run["identical_to_plain"] == 1.0
        assert run["output_tokens_per_s_min"] <= run["output_tokens_per_s"] <= run["output_tokens_per_s_max"]
        assert abs(sum(run["phase_share"].values()) - 1.0) < 0.01


def test_plain_runs_have_length_one_and_a_model_that_drafts_for_itself_the_longest(report):
    lengths = {run["drafter"]: run["accepted_length"] for run in report["runs"]}
    assert lengths.pop("none") == 1.0
    lengths.pop("ngram")
    (itself,) = lengths.values()
    # 12 tokens: one from the prefill, then rounds of 6 and 5 (the last token left needs no draft)
    assert itself == 5.5


def test_there_is_a_ceiling_for_every_concurrency(report):
    assert set(report["ceiling"]) == {"1", "2"}
    assert all(rate > 0 for rate in report["ceiling"].values())


def test_the_verb_prints_a_table_and_one_json_line_last(model_folder, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "abab"}\n{"turns": ["hello"]}\n{"prompt": "never reached"}\n')
    argv = ["bench", "--model", str(model_folder), "--drafters", "ngram", "--concurrency", "1", "--prompts", str(path)]
    argv += ["--num-prompts", "2", "--max-tokens", "4", "--repeats", "1", "--compare-transformers"]
    assert main(argv) == 0
    output = capsys.readouterr().out
    report = json.loads(output.splitlines()[-1])
    assert report["settings"]["num_prompts"] == 2
    assert {r["drafter"]: r["identical_to_plain"] for r in report["runs"]} == {
        "none": 1.0,
        "ngram": 1.0,
        "transformers": 1.0,
    }
    assert "Ceiling of plain decoding" in output


@pytest.mark.parametrize(
    ("names", "first", "second"),
    [
        (["none"], [["none"]], [["none"]]),
        (["none", "a"], [["a", "none"]], [["none", "a"]]),
        (
            ["none", "a", "b", "c"],
            [["a", "none", "b"], ["c", "none"]],
            [["b", "none", "a"], ["none", "c"]],
        ),
    ],
)
def test_every_pass_has_a_plain_one_right_next_to_it(names, first, second):
    assert list(turns(names, is_reversed=False)) == first
    assert list(turns(names, is_reversed=True)) == second


def one_pass(tokens_per_s, **counts):
    return PassResult(
        wall_s=1.0,
        token_ids=[[1] * tokens_per_s],
        ttft_s=[0.1],
        tpot_s=[0.1],
        speculation=SpeculationStats(num_rounds=20, num_verified=30, num_accepted=15, num_emitted=35),
        **counts,
    )


def test_ratios_are_those_of_each_pass_and_the_plain_one_next_to_it():
    """The machine becomes twice as fast: the ratios stay."""
    pairs = [(one_pass(rate * 3, num_declined=5), one_pass(rate * 2)) for rate in (10, 15, 20)]
    run = summary(pairs)
    assert [run[f"ratio_to_plain{end}"] for end in ("", "_min", "_max")] == [1.5, 1.5, 1.5]
    assert [run[f"output_tokens_per_s{end}"] for end in ("", "_min", "_max")] == [45.0, 30.0, 60.0]
    assert (run["verified_length"], run["accepted_length"], run["acceptance_rate"]) == (1.5, 1.75, 0.5)
    assert (run["declined_share"], run["num_passes"], run["num_requests"]) == (0.25, 3, 1)
    assert summary([(one_pass(1), one_pass(1))])["declined_share"] is None


def test_a_fixed_length_is_verified_in_every_round(model_folder):
    """A model that drafts for itself: after the prefill's token, 11 in rounds of 3, 3, 3 and 2."""
    config = EngineConfig(model=str(model_folder), speculation=SpeculationConfig(scheduler="fixed"))
    bench = BenchConfig(drafters=(f"{model_folder}@2",), concurrency=(1,), max_tokens=12, repeats=1)
    plain, fixed = run_bench(config, bench, PROMPTS)["runs"]
    assert (fixed["verified_length"], fixed["accepted_length"], fixed["declined_share"]) == (1.75, 2.75, 0.0)
    assert (plain["verified_length"], plain["declined_share"]) == (0.0, None)


def test_temperatures_are_cells_of_one_run_and_larger_batches_get_more_prompts(model_folder):
    config = EngineConfig(model=str(model_folder), speculation=SpeculationConfig(scheduler="fixed"))
    bench = BenchConfig(
        drafters=("ngram",), concurrency=(1, 3), num_prompts=(2,), max_tokens=4, repeats=1, temperatures=(0.0, 1.0)
    )
    report = run_bench(config, bench, PROMPTS)
    cells = [(run["drafter"], run["concurrency"], run["temperature"], run["num_requests"]) for run in report["runs"]]
    assert cells == [(d, c, t, n) for c, n in ((1, 2), (3, 3)) for t in (0.0, 1.0) for d in ("none", "ngram")]
    assert report["settings"]["temperatures"] == (0.0, 1.0)
    assert report["settings"]["temperature"] is None


@pytest.mark.parametrize(
    ("num_prompts", "expected"),
    [(None, [50, 50, 50]), ((8,), [8, 8, 32]), ((8, 20, 48), [8, 20, 48]), ((8, 2, 3), [8, 4, 32])],
)
def test_a_pass_answers_as_many_prompts_as_wanted_and_never_fewer_than_at_a_time(num_prompts, expected):
    bench = BenchConfig(concurrency=(1, 4, 32), num_prompts=num_prompts)
    assert [bench.prompts_at(size, 50) for size in bench.sizes] == expected


def test_more_prompts_than_there_are_is_said(model_folder):
    for settings in ({"concurrency": (4,)}, {"concurrency": (1, 2), "num_prompts": (3, 5)}):
        with pytest.raises(ConfigError, match=r"prompts at a concurrency of \d are more than there are \(3\)"):
            run_bench(EngineConfig(model=str(model_folder)), BenchConfig(**settings), PROMPTS)


def test_sampled_answers_are_compared_when_they_are_seeded(model_folder):
    bench = BenchConfig(drafters=("ngram",), concurrency=(2,), max_tokens=12, repeats=1, temperatures=(1.0,), seed=3)
    report = run_bench(EngineConfig(model=str(model_folder)), bench, PROMPTS)
    assert [run["identical_to_plain"] for run in report["runs"]] == [1.0, 1.0]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tokens": 0},
        {"repeats": 0},
        {"num_prompts": (0,)},
        {"num_prompts": (3, 4)},
        {"drafters": ()},
        {"drafters": ("auto@0",)},
        {"concurrency": (0,)},
        {"concurrency": ()},
        {"temperatures": ()},
        {"temperatures": (1.0, 1.0)},
        {"temperatures": (-1.0,)},
    ],
)
def test_a_bench_that_measures_nothing_is_refused(settings):
    with pytest.raises(DsparkError):
        BenchConfig(**settings)


def test_the_shipped_drafter_is_measured_alone_and_with_ngram_under_the_names_given(tmp_path, monkeypatch, capsys):
    target = tmp_path / "target"
    target.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(FIXTURES / "tiny_target" / name, target)
    WordTokenizer(256).backend.save(str(target / "tokenizer.json"))
    copy_checkpoint("deepspec_vanilla", tmp_path / "package" / "tiny")
    monkeypatch.setattr(shipped_drafters, "SHIPPED_FOLDER", tmp_path / "package")
    monkeypatch.setattr(shipped_drafters, "SHIPPED_DRAFTERS", {"identity": "tiny"})
    monkeypatch.setattr(build, "resolve_model", lambda name: replace(resolve_model(name), gguf_sha256="identity"))
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "t1"}\n{"prompt": "t2"}\n')
    argv = ["bench", "--model", str(target), "--prompts", str(path), "--concurrency", "1", "--max-tokens", "6"]
    drafters = ["none", "ngram", "dspark", "dspark+ngram"]
    assert main([*argv, "--repeats", "1", "--scheduler", "fixed", "--drafters", ",".join(drafters)]) == 0
    runs = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert {run["drafter"]: run["identical_to_plain"] for run in runs} == dict.fromkeys(drafters, 1.0)
    assert all(run["acceptance_rate"] is not None for run in runs if run["drafter"].startswith("dspark"))
