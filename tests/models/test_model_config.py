"""config.json of every supported kind is understood; the rest is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LLAMA3_ROPE

from dspark.errors import CheckpointError
from dspark.models.model_config import DecoderConfig, decoder_config_from

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def read(folder: Path, **changes: Any) -> DecoderConfig:
    raw = {key: value for key, value in (LLAMA | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    return decoder_config_from(folder)


def test_plain_llama_is_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert config.attention_scale == pytest.approx(8**-0.5)
    assert config.layer_types == ("full_attention", "full_attention")
    assert config.window(0) is None
    assert not (config.has_qkv_bias or config.has_qk_norm or config.has_sandwich_norms or config.ties_embeddings)


def test_old_and_new_spelling_of_rotary_settings_mean_the_same(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = read(tmp_path, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0})
    assert old.rotary == new.rotary
    assert new.rotary["full_attention"].inverse_frequencies[1] == pytest.approx(500 ** (-2 / 8) / 2)


def test_default_rotary_frequencies_fall_geometrically(tmp_path: Path) -> None:
    frequencies = read(tmp_path, rope_theta=10000.0).rotary["full_attention"].inverse_frequencies
    assert frequencies == pytest.approx((1.0, 0.1, 0.01, 0.001))


def test_llama3_scaling_slows_only_the_long_waves(tmp_path: Path) -> None:
    """Waves over 32 positions (original length / low factor) turn 8 times slower, those under 8 as before."""
    plain = read(tmp_path, rope_theta=10000.0).rotary["full_attention"].inverse_frequencies
    scaled = read(tmp_path, rope_parameters=LLAMA3_ROPE).rotary["full_attention"].inverse_frequencies
    assert scaled[0] == pytest.approx(plain[0])  # wave length 6.3
    assert [2 * math.pi / f > 32 for f in plain] == [False, True, True, True]
    assert scaled[1:] == pytest.approx([f / 8 for f in plain[1:]])


def test_yarn_changes_the_magnitude(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    rotary = read(tmp_path, rope_parameters=yarn).rotary["full_attention"]
    assert rotary.magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_mistral_slides_in_every_layer(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=9)
    assert [config.window(layer) for layer in range(2)] == [9, 9]


def test_gemma3_layers_differ_in_window_and_rotary_base(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        model_type="gemma3_text",
        architectures=["Gemma3ForCausalLM"],
        head_dim=8,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
    )
    assert [config.window(layer) for layer in range(2)] == [9, None]
    assert config.rotary["sliding_attention"].inverse_frequencies[1] == pytest.approx(10000 ** (-1 / 4))
    assert config.rotary["full_attention"].inverse_frequencies[1] == pytest.approx(1000000 ** (-1 / 4))
    assert config.embedding_scale == pytest.approx(math.sqrt(32))


def test_multimodal_gemma3_gives_its_text_part(tmp_path: Path) -> None:
    text = {key: value for key, value in LLAMA.items() if key not in ("architectures", "model_type")}
    config = read(
        tmp_path,
        model_type="gemma3",
        architectures=["Gemma3ForConditionalGeneration"],
        text_config=text | {"model_type": "gemma3_text", "head_dim": 8},
    )
    assert (config.architecture, config.hidden_size, config.num_layers) == ("Gemma3ForConditionalGeneration", 32, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*supported: LlamaForCausalLM"),
        ({"model_type": ...}, "unsupported architecture"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised checkpoint.*awq"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'.*supported: default"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"hidden_act": "relu"}, "activation 'relu'.*supported: silu"),
        ({"num_key_value_heads": 3}, "num_attention_heads.*4.*3"),
        ({"hidden_size": "wide"}, "config.json"),
        (
            {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "linear"]},
            "config.json|linear",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, **changes)


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        decoder_config_from(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_damaged_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        decoder_config_from(tmp_path)
