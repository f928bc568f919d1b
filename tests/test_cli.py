"""The command line: flags, files, exit statuses."""

from __future__ import annotations

import pytest

from dspark.cli import build_parser, main
from dspark.cli_engine import ENGINE_FLAGS, engine_config
from dspark.config import EngineConfig

VERBS = tuple(build_parser()._subparsers._group_actions[0].choices)  # type: ignore[union-attr]


def test_no_flags_are_the_default_settings():
    assert engine_config(build_parser().parse_args(["serve"])) == EngineConfig()


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "dspark.yaml"
    path.write_text("drafter: none\nspeculation: {num_draft_tokens: 2, verification: block}\n")
    args = build_parser().parse_args(["serve", "--config", str(path), "--num-draft-tokens", "4", "--no-prefix-caching"])
    config = engine_config(args)
    assert (config.drafter, config.speculation.num_draft_tokens, config.speculation.verification) == (
        "none",
        4,
        "block",
    )
    assert not config.cache.prefix_caching


def test_every_engine_flag_reaches_its_setting():
    values = {"dtype": "bfloat16", "verification": "coupled", "model": "m", "drafter": "none", "device": "meta"}
    values |= {"weights": "int8", "drafter_layout": "speculators", "max_wait_time": "48ms", "scheduler": "threshold"}
    values |= {"tool_call_format": "mistral", "reasoning_format": "think"}
    values |= {"confidence_threshold": 0.48, "fallback_strategy": "off", "capacity_file": "sps.json"}
    argv, expected = ["serve", "--no-prefix-caching"], {"prefix_caching": False}
    for flag in ENGINE_FLAGS:
        if flag != "prefix_caching":
            expected[flag] = values.get(flag, 48)
            argv += [f"--{flag.replace('_', '-')}", str(expected[flag])]
    config = engine_config(build_parser().parse_args(argv))
    for flag, path in ENGINE_FLAGS.items():
        value = config
        for key in path:
            value = getattr(value, key)
        assert value == expected[flag], flag


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_there_for_every_verb(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        main([verb, "--help"])
    assert caught.value.code == 0
    assert "--log-level" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--config", "absent.yaml"], "cannot read the configuration file absent.yaml"),
        (["generate", "hi", "--temperature", "-1"], "temperature"),
        (["bench", "--concurrency", "1,x"], "--concurrency (1,x)"),
        (["bench", "--num-prompts", "0"], "--num-prompts (0) must be at least 1"),
        (["serve", "--threads", "99999999999"], "num_threads (99999999999) must be at most 1024"),
        (["bench", "--repeats", "0"], "repeats (0) must be at least 1"),
        (["bench", "--prompts", "absent.jsonl"], "cannot read the prompt file absent.jsonl"),
        (["generate", "hi", "--device", "nonsense"], "device ('nonsense') cannot be used here"),
    ],
)
def test_a_users_mistake_is_one_line_and_status_two(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("dspark: error: ")
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("value", ["nan", "-1", "inf", "soon"])
def test_a_shutdown_timeout_that_is_no_time_is_refused(value, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--shutdown-timeout", value])
    assert caught.value.code == 2
    assert "invalid number of seconds value" in capsys.readouterr().err


def test_a_closed_standard_input_is_a_users_mistake(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate"]) == 2
    assert "standard input is closed" in capsys.readouterr().err
