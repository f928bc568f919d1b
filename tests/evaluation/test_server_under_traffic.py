"""Load tests, soaks and the serving benchmark on a real server process with a tiny model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from byte_tokenizers import byte_level_backend
from tiny_models import make_model

from dspark.cli import main
from dspark.config import BatchingConfig, CacheConfig, EngineConfig, SpeculationConfig, engine_config_from

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    tiny = make_model("llama", vocab_size=size, eos_token_id=None, max_position_embeddings=2048)
    tiny.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def test_a_soak_reports_what_happened_and_draws_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Latencies and memory of so few seconds say nothing, and may miss their bounds."""
    files = ["--report", str(tmp_path / "soak.json"), "--plot", str(tmp_path / "soak.svg")]
    flags = ["--duration", "8", "--clients", "4", "--rehearse-tokens", "2"]
    server = ["--", "--model", model, "--drafter", "ngram", "--scheduler", "fixed"]
    assert main(["soak", *flags, *files, *server]) in (0, 1)
    report = json.loads((tmp_path / "soak.json").read_text())
    missed = {check["name"] for check in report["checks"] if not check["is_met"]}
    # Whether one of the short bursts meets a call, and a canary comes twice, is a matter of the machine's speed.
    needs_time = {"growth of memory", "faults of the drafter", "answers of canaries compared"}
    assert all("per first" in name or name in needs_time for name in missed), missed
    assert report["problems"] == []
    assert report["exit_status"] == 0
    assert "times to first token (ms)" in (tmp_path / "soak.svg").read_text()
    assert "unexplained errors" in capsys.readouterr().out


def test_a_load_test_reports_what_happened(model: str, tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    flags = ["--duration", "6", "--streams", "10", "--rehearse-tokens", "2", "--report", str(path)]
    assert main(["load", *flags, "--", "--model", model, "--drafter", "none"]) in (0, 1)
    report = json.loads(path.read_text())
    missed = {check["name"] for check in report["checks"] if not check["is_met"]}
    assert missed <= {"growth of memory", "time per token of steady streams, rough per calm"}
    assert report["outcomes"]["steady stream"]["answered"] > 0
    assert 1 <= report["most_running"] <= 10


def test_the_serving_benchmark_compares_http_with_the_engine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--drafters", "none", "--repeats", "1", "--num-prompts", "2", "--concurrency", "2", "--max-tokens", "4"]
    assert main(["bench", "--serving", "--model", model, *flags]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (run,) = report["runs"]
    assert report["kind"] == "bench_serving"
    assert run["http_per_engine"] == pytest.approx(run["http_tokens_per_s"] / run["engine_tokens_per_s"], rel=0.01)
    assert run["first_event_after_engine_ms_p50"] > 0


def test_a_server_that_does_not_start_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "--", "--model", "absent/folder/of/no/model", "--port", "-1"]) == 2
    message = capsys.readouterr().err
    assert "the server ended with status 2" in message
    assert "port (-1) must be between 0 and 65535" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--jump", "1:2"], "does not go with --serving"),
        (["--temperature", "1"], "--temperature (1) does not go with --serving"),
        (["--concurrency", "1,4"], "--concurrency (1,4) must be one number with --serving"),
    ],
)
def test_flags_that_do_not_go_with_serving_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--serving", *flags]) == 2
    assert message in capsys.readouterr().err


def test_settings_survive_the_way_through_a_file() -> None:
    config = EngineConfig(
        drafter="ngram",
        speculation=SpeculationConfig(scheduler="fixed", num_draft_tokens=3),
        batching=BatchingConfig(max_size=7, target_tpot_ms=50.0),
        cache=CacheConfig(prefix_caching=False),
    )
    assert engine_config_from(json.loads(json.dumps(asdict(config)))) == config
