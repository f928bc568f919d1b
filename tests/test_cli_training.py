"""The verbs `dspark regenerate` and `dspark export` on the command line: flags, exit statuses."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, says
from training_cases import write_records

from dspark.cli import build_parser, main
from dspark.config import EngineConfig
from dspark.request import RequestOutput
from dspark.training.regenerate_config import RegenerateConfig


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run `dspark regenerate` with a fake engine over a model that is a folder only."""
    (tmp_path / "model").mkdir()

    def run(*argv: str, engine: FakeEngine | None = None, prompts: Any = ({"prompt": "hello"},)) -> int:
        configs: list[EngineConfig] = []

        def load_engine(config: EngineConfig) -> FakeEngine:
            configs.append(config)
            return engine or FakeEngine(says("hi"))

        monkeypatch.setattr("dspark.engine.build.load_engine", load_engine)
        path = write_records(tmp_path / "prompts.jsonl", prompts)
        output = ["--output", str(tmp_path / "out.jsonl"), "--model", str(tmp_path / "model"), "--max-tokens", "16"]
        status = main(["regenerate", str(path), *output, *argv])
        assert [config.model for config in configs] == [str(tmp_path / "model")]
        return status

    return run


def test_every_setting_has_a_flag() -> None:
    argv = ["regenerate", "a", "b", "--output", "out", "--temperatures", "0,0.5", "--top-k", "3", "--top-p", "0.5"]
    argv += ["--max-tokens", "4", "--max-user-tokens", "5", "--seed", "6", "--self-prompt", "7"]
    args = vars(build_parser().parse_args(argv))
    expected = {
        "prompts": ["a", "b"],
        "output": "out",
        "temperatures": (0.0, 0.5),
        "top_k": 3,
        "top_p": 0.5,
        "max_tokens": 4,
        "max_user_tokens": 5,
        "seed": 6,
        "self_prompt": 7,
    }
    assert {key: args[key] for key in expected} == expected
    assert expected.keys() == RegenerateConfig(output="out", self_prompt=1).to_json().keys()


def test_answers_go_into_the_file_that_is_printed(
    answer: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer("--threads", "1") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out.jsonl'}\n"
    assert json.loads((tmp_path / "out.jsonl").read_text())["response"] == "hi"
    assert json.loads((tmp_path / "out.run.json").read_text())["engine"]["num_threads"] == 1


def test_a_failed_conversation_is_status_one(answer: Callable[..., int]) -> None:
    assert answer(prompts=[{"prompt": "hello"}, {"prompt": "x" * 99}]) == 1


def test_ctrl_c_is_status_130_and_the_same_command_goes_on(
    answer: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(FakeEngine):
        def step(self) -> list[RequestOutput]:
            if self.num_steps == 1:
                signal.raise_signal(signal.SIGINT)
            return super().step()

    assert answer(engine=Interrupted(says("a longer answer"))) == 130
    assert "dspark: stopped; the same command goes on" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == ""
    assert answer() == 0
    assert (tmp_path / "out.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["regenerate", "--output", "out.jsonl"], "prompt files and self_prompt: neither given"),
        (
            ["regenerate", "p", "--self-prompt", "1", "--output", "out.jsonl"],
            "prompt files and self_prompt: both given",
        ),
        (["regenerate", "p", "--temperatures", "-1", "--output", "out.jsonl"], "temperature (-1.0)"),
        (["export", "absent-drafter", "--layout", "deepspec", "--output", "out"], "'absent-drafter' does not exist"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_two(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("dspark: error: ")
    assert message in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["regenerate", "p"], "--output"),
        (["regenerate", "p", "--output", "o", "--temperatures", "0;1"], "'0;1' must be numbers separated by commas"),
        (["export", "d", "--output", "o"], "--layout"),
        (["export", "d", "--layout", "auto", "--output", "o"], "invalid choice: 'auto'"),
    ],
)
def test_a_flag_that_is_missing_or_wrong_is_named(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
