"""Settings: defaults, files, flags over files, and errors that name the key."""

from __future__ import annotations

import pytest

from dspark.config import BatchingConfig, EngineConfig, SpeculationConfig, engine_config_from, load_engine_config
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
        ({"batching": {"max_size": "4"}}, r"batching.max_size \('4'\) must be int, not str"),
        ({"batching": {"max_size": True}}, r"batching.max_size \(True\) must be int, not bool"),
        ({"cache": {"prefix_caching": 1}}, "must be bool, not int"),
        ({"max_model_len": 1.5}, r"must be int or null, not float"),
        ({"dtype": "int8"}, "must be one of auto, float32, bfloat16, float16"),
        ({"speculation": {"verification": "none"}}, "must be one of rejection, block, coupled"),
        ({"speculation": {"num_draft_tokens": 65}}, "must be at most 64"),
        ({"speculation": {"num_draft_tokens": -1}}, "must be at least 0"),
        ({"batching": {"max_size": 300}}, "each running request needs one token a step"),
        ({"cache": {"page_size": 0}}, "must be at least 1"),
        ({"num_threads": 0}, "must be at least 1"),
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
