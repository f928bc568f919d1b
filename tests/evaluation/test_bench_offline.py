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
from dspark.errors import ConfigError
from dspark.evaluation.bench_offline import BenchConfig, run_bench
from dspark.evaluation.prompts import PromptRecord
from dspark.models import shipped_drafters
from dspark.models.model_source import resolve_model

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


def test_sampled_answers_are_compared_when_they_are_seeded(model_folder):
    bench = BenchConfig(drafters=("ngram",), concurrency=(2,), max_tokens=12, repeats=1, temperature=1.0, seed=3)
    report = run_bench(EngineConfig(model=str(model_folder)), bench, PROMPTS)
    assert [run["identical_to_plain"] for run in report["runs"]] == [1.0, 1.0]


@pytest.mark.parametrize(
    "settings", [{"max_tokens": 0}, {"repeats": 0}, {"drafters": ()}, {"concurrency": (0,)}, {"concurrency": ()}]
)
def test_a_bench_that_measures_nothing_is_refused(settings):
    with pytest.raises(ConfigError):
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
