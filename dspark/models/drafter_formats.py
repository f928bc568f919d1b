"""The two layouts of a drafter's config.json, "deepspec" and "speculators", to and from `DrafterConfig`.

A layout decides what the keys mean (tap ids, slots, attention); the keys themselves are looked up in either place, so
that a user who knows better than the file can override its layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from dspark.errors import CheckpointError, ConfigError
from dspark.models.drafter_config import DrafterConfig, qwen3_config
from dspark.models.model_config import FULL_ATTENTION, SLIDING_ATTENTION, read_json_object

DEEPSPEC = "deepspec"
SPECULATORS = "speculators"
LAYOUTS = (DEEPSPEC, SPECULATORS)

_SUPPORTED = 'DeepSpec\'s Qwen3DSparkModel and the speculators layout ("speculators_model_type": "dspark")'
_DEEPSPEC_ARCHITECTURE = "Qwen3DSparkModel"
_SPECULATORS_ARCHITECTURE = "DSparkDraftModel"
_LAYER_KEYS = {  # config.json -> DrafterConfig
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position",
    "rms_norm_eps": "rms_norm_eps",
}
_LAYER_SETTINGS = (
    *_LAYER_KEYS,
    *("rope_theta", "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window"),
    *("max_window_layers", "hidden_act", "attention_bias"),
)

_Kind = TypeVar("_Kind", int, bool, str)


def drafter_config_from(folder: Path, *, layout: str = "auto") -> DrafterConfig:
    """Read `folder`/config.json; `layout` "deepspec" or "speculators" overrides what the file says of itself.

    Raises `CheckpointError` naming the key that is missing, malformed, contradictory or unsupported.
    """
    path = folder / "config.json"
    raw = read_json_object(path)
    if layout == "auto":
        layout = _detected_layout(raw, path)
    elif layout not in LAYOUTS:
        raise ConfigError(f"drafter layout ({layout!r}) must be auto, {' or '.join(LAYOUTS)}")
    keys = _Keys(raw, path, layout)
    layers, rope_parameters = _layer_settings(keys)
    markov_rank = keys.get("markov_rank", int, 0)
    has_confidence_head = keys.get("enable_confidence_head", bool, False)
    vocab_size = layers["vocab_size"]
    verifier = _verifier(raw)
    sliding = _sliding_window(keys, layers.pop("layer_types"), layers.pop("sliding_window"))
    is_sliding_causal = layout == SPECULATORS and not keys.get("sliding_window_non_causal", bool, False)
    return DrafterConfig(
        **layers,
        rope_parameters=rope_parameters,
        target_hidden_size=keys.get("target_hidden_size", int, layers["hidden_size"]),
        draft_vocab_size=keys.get("draft_vocab_size", int, vocab_size),
        block_size=keys.require("block_size", int),
        samples_from_anchor=_samples_from_anchor(keys),
        tap_ids=_tap_ids(keys),
        mask_token_id=keys.require("mask_token_id", int),
        windows=sliding,
        is_causal=tuple(window is not None and is_sliding_causal for window in sliding),
        markov_rank=markov_rank,
        markov_head_type=keys.get("markov_head_type", str, "vanilla") if markov_rank else None,
        has_confidence_head=has_confidence_head,
        # Without a Markov head there is nothing to read; savers leave the default in place.
        confidence_uses_markov=(
            has_confidence_head and markov_rank > 0 and keys.get("confidence_head_with_markov", bool, True)
        ),
        num_target_layers=keys.find("num_target_layers", int),
        num_anchors=keys.get("num_anchors", int, 512),
        target_name=verifier.get("name_or_path"),
        target_architecture=next(iter(verifier.get("architectures") or ()), None),
    )


def is_drafter_folder(folder: Path) -> bool:
    """Return whether `folder`/config.json describes a drafter of any layout, supported or not; False without one."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    raw = read_json_object(path)
    return (
        bool({"speculators_model_type", "dflash_config"} & raw.keys())
        or {"block_size", "mask_token_id"} <= raw.keys()
        or _DEEPSPEC_ARCHITECTURE in (raw.get("architectures") or [])
    )


def config_json(config: DrafterConfig, layout: str, *, dtype: str) -> dict[str, Any]:
    """Return the config.json of `layout` for weights stored as `dtype` ("float32", "bfloat16", ...).

    Raises `ConfigError` naming what the layout cannot express.
    """
    if layout == DEEPSPEC:
        return _deepspec_json(config, dtype)
    if layout == SPECULATORS:
        return _speculators_json(config, dtype)
    raise ConfigError(f"drafter layout ({layout!r}) must be {' or '.join(LAYOUTS)}")


class _Keys:
    """Values of config.json by key, checked for their type."""

    def __init__(self, raw: Mapping[str, Any], path: Path, layout: str) -> None:
        self.path = path
        self.layout = layout
        inner = raw.get("dflash_config")  # SpecForge; only reached when the user named the layout
        self.raw = {**raw, **inner} if isinstance(inner, dict) else dict(raw)

    def find(self, key: str, kind: type[_Kind]) -> _Kind | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CheckpointError(f"{key} ({value!r}) in {self.path} must be {kind.__name__}; correct it")
        return value

    def get(self, key: str, kind: type[_Kind], default: _Kind) -> _Kind:
        value = self.find(key, kind)
        return default if value is None else value

    def require(self, key: str, kind: type[_Kind]) -> _Kind:
        value = self.find(key, kind)
        if value is None:
            raise CheckpointError(
                f"{key} is missing in {self.path}, which was read in the {self.layout} layout; "
                "add it, or name the other layout"
            )
        return value

    def find_ids(self, key: str) -> tuple[int, ...] | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise CheckpointError(f"{key} ({value!r}) in {self.path} must be a list of layer numbers; correct it")
        return tuple(value)


def _detected_layout(raw: Mapping[str, Any], path: Path) -> str:
    model_type = raw.get("speculators_model_type")
    if model_type is not None:
        if model_type == "dspark":
            return SPECULATORS
        raise CheckpointError(f"{path} describes an unsupported speculators_model_type ({model_type!r}); {_only()}")
    if "dflash_config" in raw:
        raise CheckpointError(
            f"{path} is a SpecForge file (its keys are under dflash_config), which does not say what its slots mean; "
            f"{_only()}; if slot k proposes the token at anchor+k+1, set the layout to {DEEPSPEC}"
        )
    architectures = raw.get("architectures") or []
    if _DEEPSPEC_ARCHITECTURE in architectures:
        return DEEPSPEC
    named = architectures[0] if architectures else f"model_type {raw.get('model_type')!r}"
    raise CheckpointError(f"{path} describes an unsupported drafter ({named}); {_only()}")


def _only() -> str:
    return f"supported: {_SUPPORTED}"


def _layer_settings(keys: _Keys) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that describe the draft layers, and their rope parameters.

    The file may hold only what differs from the defaults of transformers' Qwen3Config, so that class completes it.
    """
    from transformers import Qwen3Config  # takes a second to import

    stored = keys.raw.get("transformer_layer_config", keys.raw)
    if not isinstance(stored, dict):
        raise CheckpointError(f"transformer_layer_config in {keys.path} must be an object; correct it")
    model_type = stored.get("model_type", "qwen3")
    if model_type != "qwen3":
        raise CheckpointError(f"draft layers of model_type {model_type!r} in {keys.path}; {_only()}, of type qwen3")
    try:
        config = Qwen3Config(**{key: stored[key] for key in _LAYER_SETTINGS if key in stored})
    except Exception as error:  # transformers raises many kinds, each about the file's content
        raise CheckpointError(f"{keys.path} is not a valid drafter configuration: {error}") from error
    if config.attention_bias:
        raise CheckpointError(f"attention_bias (true) in {keys.path} is not supported; use a drafter without biases")
    if config.hidden_act not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act ({config.hidden_act!r}) in {keys.path} is not supported; supported: silu")
    fields: dict[str, Any] = {name: getattr(config, key) for key, name in _LAYER_KEYS.items()}
    for key, name in _LAYER_KEYS.items():
        if not isinstance(fields[name], (int, float)) or isinstance(fields[name], bool) or fields[name] <= 0:
            raise CheckpointError(f"{key} ({fields[name]!r}) in {keys.path} must be a positive number; correct it")
    fields["layer_types"] = config.layer_types
    fields["sliding_window"] = stored.get("sliding_window") or config.sliding_window
    rope_parameters: dict[str, Any] = dict(config.rope_parameters or {})
    # Stray flat keys may stand beside tables for each kind of layer.
    return fields, dict(rope_parameters.get(FULL_ATTENTION, rope_parameters))


def _sliding_window(keys: _Keys, layer_types: list[str], window: Any) -> tuple[int | None, ...]:
    unknown = sorted(set(layer_types) - {FULL_ATTENTION, SLIDING_ATTENTION})
    if unknown:
        raise CheckpointError(
            f"layer type {unknown[0]!r} in {keys.path} is not supported; supported: {FULL_ATTENTION}, "
            f"{SLIDING_ATTENTION}"
        )
    if SLIDING_ATTENTION in layer_types:
        if keys.layout == DEEPSPEC:
            raise CheckpointError(
                f"layer_types in {keys.path} has {SLIDING_ATTENTION}, but the {DEEPSPEC} layout knows full attention "
                f"only; if the file follows the conventions of speculators, set the layout to {SPECULATORS}"
            )
        if type(window) is not int:
            raise CheckpointError(
                f"sliding_window ({window!r}) in {keys.path} must be a number of tokens, for layer_types has "
                f"{SLIDING_ATTENTION}; correct it"
            )
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in layer_types)


def _tap_ids(keys: _Keys) -> tuple[int, ...]:
    own, other = "target_layer_ids", "aux_hidden_state_layer_ids"
    if keys.layout == SPECULATORS:
        own, other = other, own
    ids = keys.find_ids(own)
    if ids is not None and keys.find_ids(other) is not None:
        raise CheckpointError(
            f"{keys.path} has both {own} ({list(ids)}) and {other} ({list(keys.find_ids(other) or ())}), which number "
            "layers differently; remove one"
        )
    if ids is None:
        ids = keys.find_ids(other)  # numbered as the layout numbers, for its user chose it
    if ids is None:
        raise CheckpointError(f"{own} is missing in {keys.path}; add the tapped layers, or name the other layout")
    # Hidden state j of transformers is the output of layer j - 1.
    return tuple(j - 1 for j in ids) if keys.layout == SPECULATORS else ids


def _samples_from_anchor(keys: _Keys) -> bool:
    stored = keys.find("sample_from_anchor", bool)
    if keys.layout == DEEPSPEC:
        if stored is False:
            raise CheckpointError(
                f"sample_from_anchor (false) in {keys.path} contradicts the {DEEPSPEC} layout, where slot 0 proposes; "
                f"remove it, or set the layout to {SPECULATORS}"
            )
        return True
    is_from_anchor = bool(stored)  # older savers knew fill-in only, and did not write the key
    block_size = keys.require("block_size", int)
    num_proposals = block_size if is_from_anchor else block_size - 1
    for method in _proposal_methods(keys.raw):
        count = method.get("speculative_tokens")
        if count is not None and count != num_proposals:
            shown = "absent, which means false" if stored is None else str(stored).lower()
            raise CheckpointError(
                f"speculative_tokens ({count}) in {keys.path} contradicts sample_from_anchor ({shown}) with block_size "
                f"{block_size}, which propose {num_proposals} tokens; correct the one that is wrong"
            )
    return is_from_anchor


def _proposal_methods(raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    section = raw.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, dict) else None
    return [method for method in methods if isinstance(method, dict)] if isinstance(methods, list) else []


def _verifier(raw: Mapping[str, Any]) -> dict[str, Any]:
    section = raw.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, dict) else None
    return verifier if isinstance(verifier, dict) else {}


def _deepspec_json(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    impossible = {
        "sample_from_anchor false (fill-in)": not config.samples_from_anchor,
        f"a pruned vocabulary ({config.draft_vocab_size} of {config.vocab_size} ids)": config.has_pruned_vocab,
        "sliding windows or causal blocks": any(config.is_causal) or any(w is not None for w in config.windows),
        "a hidden size other than the target's": config.target_hidden_size != config.hidden_size,
        "a drafter whose num_target_layers is not known": config.num_target_layers is None,
    }
    _refuse_impossible(DEEPSPEC, impossible)
    layers = _layers_json(config, dtype)
    heads = _heads_json(config)
    if not config.markov_rank:
        del heads["markov_head_type"]
    if not config.has_confidence_head:
        del heads["confidence_head_with_markov"]
    return {
        **layers,
        **heads,
        "architectures": [_DEEPSPEC_ARCHITECTURE],
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.tap_ids),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_anchors": config.num_anchors,
    }


def _speculators_json(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    windowed = {
        (window, causal) for window, causal in zip(config.windows, config.is_causal, strict=True) if window is not None
    }
    full_causal = any(c and w is None for w, c in zip(config.windows, config.is_causal, strict=True))
    impossible = {
        "layers of different windows or causality": len(windowed) > 1,
        "full attention that is causal inside the block": full_causal,
    }
    _refuse_impossible(SPECULATORS, impossible)
    return {
        **_heads_json(config),
        "architectures": [_SPECULATORS_ARCHITECTURE],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "dtype": dtype,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layers_json(config, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.tap_ids],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.samples_from_anchor,
        "sliding_window_non_causal": any(not causal for _, causal in windowed),
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_draft_tokens,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "name_or_path": config.target_name,
                "architectures": [config.target_architecture] if config.target_architecture else [],
            },
        },
    }


def _heads_json(config: DrafterConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type or "vanilla",
        "enable_confidence_head": config.has_confidence_head,
        "confidence_head_with_markov": config.confidence_uses_markov,
    }


def _layers_json(config: DrafterConfig, dtype: str) -> dict[str, Any]:
    layers: dict[str, Any] = qwen3_config(config).to_dict()
    kept = (*_LAYER_SETTINGS, "model_type", "attention_dropout", "initializer_range", "tie_word_embeddings")
    return {key: layers[key] for key in kept if key in layers} | {"dtype": dtype}


def _refuse_impossible(layout: str, impossible: Mapping[str, bool]) -> None:
    for what, is_so in impossible.items():
        if is_so:
            other = SPECULATORS if layout == DEEPSPEC else DEEPSPEC
            raise ConfigError(f"the {layout} layout cannot express {what}; save in the {other} layout if that can")
