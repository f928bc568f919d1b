"""Both layouts of config.json mean one thing; what contradicts itself or is not known is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafter_cases import FIXTURES, change_config, copy_checkpoint, make_config

from dspark.errors import CheckpointError, ConfigError
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_formats import config_json, drafter_config_from


@pytest.fixture
def deepspec(tmp_path: Path) -> Path:
    return copy_checkpoint("deepspec_vanilla", tmp_path / "deepspec")


@pytest.fixture
def speculators(tmp_path: Path) -> Path:
    return copy_checkpoint("speculators_fill_in", tmp_path / "speculators")


def change_layers(folder: Path, **changes: Any) -> None:
    layers = json.loads((folder / "config.json").read_text())["transformer_layer_config"] | changes
    change_config(folder, transformer_layer_config={k: v for k, v in layers.items() if v is not ...})


def change_method(folder: Path, speculative_tokens: int) -> None:
    section = json.loads((folder / "config.json").read_text())["speculators_config"]
    section["proposal_methods"][0]["speculative_tokens"] = speculative_tokens
    change_config(folder, speculators_config=section)


def test_deepspec_conventions() -> None:
    config = drafter_config_from(FIXTURES / "deepspec_gated")
    assert (config.block_size, config.num_draft_tokens, config.samples_from_anchor) == (7, 7, True)
    assert (config.tap_ids, config.windows, config.is_causal) == ((1, 2, 4), (None, None), (False, False))
    assert config.predicted_offsets == (1, 2, 3, 4, 5, 6, 7)
    assert config.previous_offsets == (0, 1, 2, 3, 4, 5, 6)
    assert (config.markov_head_type, config.confidence_uses_markov) == ("gated", True)


def test_speculators_conventions() -> None:
    config = drafter_config_from(FIXTURES / "speculators_fill_in")
    assert (config.block_size, config.num_draft_tokens, config.samples_from_anchor) == (8, 7, False)
    assert (config.tap_ids, config.windows, config.is_causal) == ((0, 2, 4), (2048, 2048), (True, True))
    assert config.predicted_offsets == (0, 1, 2, 3, 4, 5, 6, 7)
    assert config.previous_offsets == (0, 0, 1, 2, 3, 4, 5, 6)
    assert (config.target_name, config.target_architecture) == ("tiny_target", "Qwen3ForCausalLM")


def test_full_attention_layers_are_never_causal() -> None:
    config = drafter_config_from(FIXTURES / "speculators_anchor_window")
    assert (config.windows, config.is_causal) == ((6, None), (True, False))


def test_sliding_layers_can_be_bidirectional(speculators: Path) -> None:
    change_config(speculators, sliding_window_non_causal=True)
    assert drafter_config_from(speculators).is_causal == (False, False)


def test_rank_zero_means_no_markov_head_whatever_type_is_named(deepspec: Path) -> None:
    change_config(deepspec, markov_rank=0, markov_head_type="vanilla")
    config = drafter_config_from(deepspec)
    assert (config.markov_head_type, config.confidence_uses_markov) == (None, False)


def test_older_rope_keys_mean_the_same(deepspec: Path) -> None:
    expected = drafter_config_from(deepspec)
    change_config(deepspec, rope_parameters=..., rope_theta=1000000.0, dtype=..., torch_dtype="float32")
    assert drafter_config_from(deepspec).rotary == expected.rotary


def test_rope_tables_by_layer_kind_may_have_stray_keys_beside(deepspec: Path) -> None:
    expected = drafter_config_from(deepspec)
    table = {"rope_type": "default", "rope_theta": 1000000.0}
    other = {"rope_type": "default", "rope_theta": 7.0}
    change_config(deepspec, rope_parameters={"full_attention": table, "sliding_attention": other, "rope_theta": 5.0})
    assert drafter_config_from(deepspec).rotary == expected.rotary


def test_layer_keys_that_are_left_out_have_the_defaults_of_qwen3(speculators: Path) -> None:
    change_layers(speculators, head_dim=..., rms_norm_eps=..., rope_parameters=..., max_position_embeddings=...)
    config = drafter_config_from(speculators)
    assert (config.head_dim, config.rms_norm_eps, config.max_position) == (128, 1e-6, 32768)
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_a_file_without_sample_from_anchor_is_fill_in(speculators: Path) -> None:
    """Case I5."""
    expected = drafter_config_from(speculators)
    change_config(speculators, sample_from_anchor=...)
    assert drafter_config_from(speculators) == expected


@pytest.mark.parametrize(
    ("sample_from_anchor", "speculative_tokens", "shown"),
    [(True, 7, "true"), (False, 8, "false"), (..., 8, "absent, which means false")],
)
def test_slots_that_contradict_the_proposals_are_refused(
    speculators: Path, sample_from_anchor: Any, speculative_tokens: int, shown: str
) -> None:
    """Case I5."""
    change_config(speculators, sample_from_anchor=sample_from_anchor)
    change_method(speculators, speculative_tokens)
    expected = rf"speculative_tokens \({speculative_tokens}\).*contradicts sample_from_anchor \({shown}\).*block_size 8"
    with pytest.raises(CheckpointError, match=expected):
        drafter_config_from(speculators)


def test_deepspec_files_cannot_be_fill_in(deepspec: Path) -> None:
    change_config(deepspec, sample_from_anchor=False)
    with pytest.raises(CheckpointError, match=r"sample_from_anchor \(false\).*contradicts the deepspec layout"):
        drafter_config_from(deepspec)


def test_tap_ids_of_both_layouts_in_one_file_are_refused(deepspec: Path) -> None:
    change_config(deepspec, aux_hidden_state_layer_ids=[1, 3, 5])
    with pytest.raises(CheckpointError, match=r"both target_layer_ids \(\[0, 2, 4\]\) and aux_hidden_state_layer_ids"):
        drafter_config_from(deepspec)


def test_sliding_layers_in_the_deepspec_layout_are_refused(deepspec: Path) -> None:
    change_config(deepspec, layer_types=["sliding_attention"] * 2, sliding_window=128, use_sliding_window=True)
    with pytest.raises(CheckpointError, match=r"deepspec layout knows full attention only.*set the layout"):
        drafter_config_from(deepspec)


def test_the_layout_can_be_overridden(deepspec: Path) -> None:
    """The keys stay where they are; what they mean changes: taps count from the embedding, slot 0 proposes nothing."""
    config = drafter_config_from(deepspec, layout="speculators")
    assert (config.tap_ids, config.samples_from_anchor, config.num_draft_tokens) == ((-1, 1, 3), False, 6)
    assert drafter_config_from(deepspec, layout="deepspec") == drafter_config_from(deepspec)


def test_an_unknown_layout_is_refused(deepspec: Path) -> None:
    with pytest.raises(ConfigError, match=r"layout \('vllm'\) must be auto, deepspec or speculators"):
        drafter_config_from(deepspec, layout="vllm")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": ...}, "model_type 'qwen3'"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"dflash_config": {"target_layer_ids": [0, 2, 4]}}, "SpecForge"),
    ],
)
def test_other_drafters_are_refused_with_what_is_supported(deepspec: Path, changes: dict[str, Any], named: str) -> None:
    change_config(deepspec, **changes)
    with pytest.raises(CheckpointError, match=rf"{named}.*supported: DeepSpec's Qwen3DSparkModel and the speculators"):
        drafter_config_from(deepspec)


def test_a_specforge_file_is_read_when_its_layout_is_named(deepspec: Path) -> None:
    expected = drafter_config_from(deepspec)
    inner = {"target_layer_ids": [0, 2, 4], "mask_token_id": 251}
    change_config(
        deepspec, architectures=["DSparkDraftModel"], target_layer_ids=..., mask_token_id=..., dflash_config=inner
    )
    assert drafter_config_from(deepspec, layout="deepspec") == expected


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids"])
def test_a_missing_key_is_named(deepspec: Path, key: str) -> None:
    change_config(deepspec, **{key: ...})
    with pytest.raises(CheckpointError, match=rf"{key} is missing"):
        drafter_config_from(deepspec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": "7"}, r"block_size \('7'\).*must be int"),
        ({"block_size": True}, r"block_size \(True\).*must be int"),
        ({"block_size": 0}, r"block_size \(0\) is too small"),
        ({"enable_confidence_head": 1}, r"enable_confidence_head \(1\).*must be bool"),
        ({"target_layer_ids": [0, "2"]}, r"target_layer_ids \(\[0, '2'\]\).*list of layer numbers"),
        ({"target_layer_ids": []}, r"target_layer_ids \(\(\)\) is empty"),
        ({"target_layer_ids": [-2, 1]}, "below -1"),
        ({"target_layer_ids": [1, 1]}, "not distinct"),
        ({"markov_head_type": "lstm"}, r"markov_head_type \(lstm\) is not one of vanilla, gated, rnn"),
        ({"draft_vocab_size": 300}, r"draft_vocab_size \(300\) is above vocab_size"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) is no multiple"),
        ({"hidden_size": 0}, r"hidden_size \(0\).*positive"),
        ({"hidden_act": "gelu"}, r"hidden_act \('gelu'\).*supported: silu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}}, "rope type 'dynamic'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_wrong_values_are_named(deepspec: Path, changes: dict[str, Any], message: str) -> None:
    change_config(deepspec, **changes)
    with pytest.raises(CheckpointError, match=message):
        _ = drafter_config_from(deepspec).rotary


def test_sliding_layers_need_their_window(speculators: Path) -> None:
    change_layers(speculators, sliding_window=..., use_sliding_window=False)
    with pytest.raises(CheckpointError, match=r"sliding_window \(None\).*must be a number of tokens"):
        drafter_config_from(speculators)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"markov_head_type": "rnn", "confidence_uses_markov": False},
    {"markov_rank": 0, "markov_head_type": None, "confidence_uses_markov": False},
    {"has_confidence_head": False, "confidence_uses_markov": False},
    {"target_name": "org/target", "target_architecture": "LlamaForCausalLM", "num_anchors": 9},
]
SPECULATORS_VARIANTS: list[dict[str, Any]] = [
    {"samples_from_anchor": False, "draft_vocab_size": 100},
    {"windows": (6, None), "is_causal": (True, False)},
    {"windows": (6, 6)},
    {"target_hidden_size": 32},
]


def written_and_read(config: DrafterConfig, layout: str, folder: Path) -> DrafterConfig:
    (folder / "config.json").write_text(json.dumps(config_json(config, layout, dtype="float32")))
    return drafter_config_from(folder)


@pytest.mark.parametrize("changes", VARIANTS)
def test_a_written_deepspec_configuration_reads_back(changes: dict[str, Any], tmp_path: Path) -> None:
    """The name of the target has no place in that layout."""
    config = make_config(**{k: v for k, v in changes.items() if not k.startswith("target_")})
    assert written_and_read(config, "deepspec", tmp_path) == config


@pytest.mark.parametrize("changes", [*VARIANTS, *SPECULATORS_VARIANTS])
def test_a_written_speculators_configuration_reads_back(changes: dict[str, Any], tmp_path: Path) -> None:
    """The number of target layers and of anchors have no place in that layout."""
    config = make_config(**changes | {"num_target_layers": None, "num_anchors": 512})
    assert written_and_read(config, "speculators", tmp_path) == config


def test_scaled_rope_is_written_and_read_back(tmp_path: Path) -> None:
    parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    config = make_config(rope_parameters=parameters)
    for layout in ("deepspec", "speculators"):
        assert written_and_read(config, layout, tmp_path).rotary == config.rotary
