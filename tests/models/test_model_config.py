"""config.json of every supported kind is understood; the rest is refused by name."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import LLAMA3_ROPE

from dspark.errors import CheckpointError
from dspark.models.model_config import DecoderConfig, decoder_config_from, reraise_interrupt

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


QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
GEMMA2 = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": 1}, r"architectures \(1\) in .*config\.json"),
        ({"architectures": "Llama"}, r"architectures \('Llama'\)"),
        ({"model_type": []}, "config.json describes an unsupported architecture"),
        *(
            ({**QWEN3, name: value}, rf"config\.json: {name} \({value}\)")
            for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size")
            for value in (-1, 0, 10**9, 10**30)
        ),
        ({"num_key_value_heads": 0}, r"config\.json: num_key_value_heads \(0\)"),
        ({"num_key_value_heads": 3}, r"config\.json: num_attention_heads \(4\) is no multiple .*\(3\)"),
        ({"head_dim": -1}, r"config\.json: head_dim \(-1\)"),
        ({"head_dim": 10**9}, r"config\.json: head_dim \(1000000000\)"),
        ({"head_dim": 7}, r"even rotary dimension, but got `head_dim`=7"),
        ({"hidden_size": 3}, r"config\.json.*hidden.*3|config\.json: head_dim \(0\)"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers \(2\.0\) must be an integer"),
        ({"num_hidden_layers": True}, r"num_hidden_layers \(True\) must be an integer"),
        ({"num_hidden_layers": None}, r"config\.json.*num_hidden_layers.*None"),
        ({"num_labels": 10**9}, r"num_labels \(1000000000\)"),
        ({"max_position_embeddings": 0}, r"max_position_embeddings \(0\)"),
        *(
            ({"rms_norm_eps": value}, rf"config\.json: rms_norm_eps \({shown}\)")
            for value, shown in (
                (0.0, "0.0"),
                (-1e-5, "-1e-05"),
                (5, "5"),
                (math.nan, "nan"),
                (math.inf, "inf"),
                ("x", "'x'"),
            )
        ),
        ({**MISTRAL, "sliding_window": "x"}, r"config\.json: sliding_window \('x'\)"),
        ({**MISTRAL, "sliding_window": 0}, r"config\.json: sliding_window \(0\)"),
        ({**MISTRAL, "sliding_window": -4}, r"config\.json: sliding_window \(-4\)"),
        ({"rope_theta": "x"}, r"config\.json: rope_theta \('x'\)"),
        ({"rope_theta": 0}, r"config\.json: rope_theta \(0\)"),
        ({"rope_theta": -1.0}, r"config\.json: rope_theta \(-1\.0\)"),
        *(
            ({"rope_parameters": {**YARN, **LLAMA3_ROPE, "rope_type": rope_type, "factor": 0}}, r"factor \(0\)")
            for rope_type in ("linear", "yarn", "llama3")
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"config\.json: factor \(0\)"),
        ({"rope_scaling": "x"}, r"config\.json.*'?x'?"),
        ({"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, r"low_freq_factor \(1\.0\) must be under"),
        ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, r"config\.json.*division by zero"),
        ({"rope_parameters": {**YARN, "mscale": math.nan, "mscale_all_dim": 1.0}}, "frequency or magnitude of nan"),
        ({**GEMMA2, "query_pre_attn_scalar": 0}, r"query_pre_attn_scalar \(0\)"),
        ({**GEMMA2, "final_logit_softcapping": -1}, r"final_logit_softcapping \(-1\)"),
        ({"hidden_act": []}, r"config\.json"),
        ({**QWEN3, "layer_types": [[], 1]}, r"config\.json"),
    ],
)
def test_damaged_value_is_named_with_the_file(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_inner_objects_are_checked_too(tmp_path: Path) -> None:
    text = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 10**9}
    with pytest.raises(CheckpointError, match=r"num_hidden_layers \(1000000000\)"):
        read(tmp_path, model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], text_config=text)


def test_huge_position_limit_is_accepted(tmp_path: Path) -> None:
    config = read(tmp_path, max_position_embeddings=2**62, rope_parameters=YARN)
    assert config.max_position == 2**62
    assert len(config.rotary["full_attention"].inverse_frequencies) == 4


def test_interrupt_within_an_import_stays_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reports whatever ends a lazy import as a missing module."""

    class InterruptedTransformers:
        @property
        def AutoConfig(self) -> None:
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt as error:
                raise ModuleNotFoundError("Could not import module 'LlamaConfig'") from error

    monkeypatch.setitem(sys.modules, "transformers", InterruptedTransformers())
    with pytest.raises(KeyboardInterrupt):
        read(tmp_path)


def test_errors_that_name_each_other_as_cause_are_no_interrupt() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    reraise_interrupt(first)


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        decoder_config_from(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"])
def test_damaged_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        decoder_config_from(tmp_path)
