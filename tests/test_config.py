"""Settings: defaults, files, flags over files, and errors that name the key."""

from __future__ import annotations

import pytest

from dspark.config import (
    BatchingConfig,
    EngineConfig,
    SpeculationConfig,
    engine_config_from,
    load_engine_config,
    resolved_max_size,
)
from dspark.errors import ConfigError


def test_no_settings_are_the_defaults():
    assert engine_config_from({}) == EngineConfig()


def test_a_file_sets_nested_values_and_overrides_win(tmp_path):
    path = tmp_path / "dspark.yaml"
    path.write_text("model: other\nspeculation: {num_draft_tokens: 3, verification: block}\nbatching: {max_size: 2}\n")
    config = load_engine_config(path, {"speculation": {"num_draft_tokens": 7}})
    assert config.model == "other"
    assert config.speculation == SpeculationConfig(num_draft_tokens=7, verification="block")
    assert config.batching == BatchingConfig(max_size=2)


def test_an_empty_file_is_the_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("")
    assert load_engine_config(path) == EngineConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"modle": "x"}, "unknown setting modle; did you mean model?"),
        ({"speculation": {"num_draft_token": 3}}, "did you mean speculation.num_draft_tokens?"),
        ({"batching": 4}, r"batching \(4\) must be a mapping"),
        ({"batching": {"max_size": "4"}}, r"batching.max_size \('4'\) must be int or null, not str"),
        ({"batching": {"max_size": True}}, r"batching.max_size \(True\) must be int or null, not bool"),
        ({"cache": {"prefix_caching": 1}}, "must be bool, not int"),
        ({"max_model_len": 1.5}, r"must be int or null, not float"),
        ({"dtype": "int8"}, "must be one of auto, float32, bfloat16, float16"),
        ({"speculation": {"verification": "none"}}, "must be one of rejection, block, coupled"),
        ({"speculation": {"num_draft_tokens": 65}}, "must be at most 64"),
        ({"speculation": {"num_draft_tokens": -1}}, "must be at least 0"),
        ({"batching": {"max_size": 300}}, "each running request needs one token a step"),
        ({"batching": {"max_size": 0}}, r"batching.max_size \(0\) must be at least 1"),
        ({"batching": {"min_size": 0}}, r"batching.min_size \(0\) must be at least 1"),
        ({"batching": {"min_size": 5, "max_size": 4}}, r"batching.min_size \(5\) exceeds batching.max_size \(4\)"),
        ({"batching": {"min_size": 257}}, r"batching.min_size \(257\) exceeds batching.max_batch_tokens \(256\)"),
        ({"batching": {"max_wait_time": "soon"}}, r"batching.max_wait_time \('soon'\) must be a time from 0 to 60 s"),
        ({"batching": {"max_wait_time": "5m"}}, r"batching.max_wait_time \('5m'\) must be .* such as 10ms, 1s or 0.01"),
        ({"batching": {"max_wait_time": -1}}, r"batching.max_wait_time \(-1\) must be a time"),
        ({"batching": {"max_wait_time": float("nan")}}, r"batching.max_wait_time \(nan\) must be a time"),
        ({"batching": {"max_wait_time": None}}, r"batching.max_wait_time \(None\) must be float or str"),
        ({"batching": {"max_wait_time": True}}, r"batching.max_wait_time \(True\) must be float or str, not bool"),
        ({"batching": {"target_tpot_ms": 0}}, r"batching.target_tpot_ms \(0\) must be a finite number of milliseconds"),
        ({"batching": {"target_tpot_ms": float("inf")}}, r"batching.target_tpot_ms \(inf\) must be a finite number"),
        ({"batching": {"target_tpot_ms": "50"}}, r"batching.target_tpot_ms \('50'\) must be float or null, not str"),
        ({"cache": {"page_size": 0}}, "must be at least 1"),
        ({"num_threads": 0}, "must be at least 1"),
        ({"chat": {"tool_call_format": "xml"}}, r"chat.tool_call_format \('xml'\) must be one of auto, none, hermes"),
        ({"chat": {"reasoning_format": "on"}}, r"chat.reasoning_format \('on'\) must be one of auto, none, think"),
    ],
)
def test_a_wrong_setting_is_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        engine_config_from(settings)


@pytest.mark.parametrize(
    ("content", "message"), [("- a\n- b\n", "must hold a mapping"), ("a: [", "cannot read"), ("\x00", "cannot read")]
)
def test_a_wrong_file_is_named(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_engine_config(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*nothing\.yaml"):
        load_engine_config(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("max_wait_time", "seconds"),
    [
        ("10ms", 0.01),
        (0.01, 0.01),
        ("1s", 1.0),
        ("0.25", 0.25),
        (" 2.5 ms ", 0.0025),
        (1, 1.0),
        (0, 0.0),
        ("1e-3s", 1e-3),
    ],
)
def test_a_wait_is_read_with_or_without_a_unit(max_wait_time, seconds):
    config = engine_config_from({"batching": {"max_wait_time": max_wait_time}})
    assert config.batching.max_wait_s == pytest.approx(seconds)


def test_a_target_may_be_a_whole_number_of_milliseconds():
    assert engine_config_from({"batching": {"target_tpot_ms": 50}}).batching.target_tpot_s == 0.05
    assert BatchingConfig().target_tpot_s is None


@pytest.mark.parametrize(
    ("batching", "size"),
    [
        (BatchingConfig(), 64),
        (BatchingConfig(max_size=7), 7),
        (BatchingConfig(max_batch_tokens=16), 16),
        (BatchingConfig(min_size=100), 100),
    ],
)
def test_pools_are_sized_for_the_largest_batch_or_a_usual_one(batching, size):
    assert resolved_max_size(batching) == size
