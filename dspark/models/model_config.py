"""Decoder families as configuration: what a Hugging Face config.json says, reduced to what the decoder computes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dspark.errors import CheckpointError

# model_type of config.json -> architectures that are the plain causal decoder of that family.
SUPPORTED_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
SUPPORTED_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

_LARGEST = 2**63 - 1
# Integers of config.json and of the objects in it, with their smallest and largest sensible value. The upper limits are
# far beyond any model; they stop a damaged number before something is allocated in proportion to it.
_INTEGER_RANGES = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "intermediate_size": (1, 2**24),
    "num_hidden_layers": (1, 2**12),
    "num_attention_heads": (1, 2**16),
    "num_key_value_heads": (1, 2**16),
    "head_dim": (1, 2**16),
    "max_position_embeddings": (1, _LARGEST),
    "original_max_position_embeddings": (1, _LARGEST),
    "sliding_window": (0, _LARGEST),  # 0 where no layer slides
    "num_labels": (0, 2**20),  # transformers makes a name for each
}
# Numbers that must be over zero, with their largest sensible value.
_POSITIVE_RANGES = {
    "rms_norm_eps": 0.1,
    "rope_theta": 1e30,
    "rope_local_base_freq": 1e30,
    "factor": 1e9,
    "low_freq_factor": 1e9,
    "high_freq_factor": 1e9,
    "beta_fast": 1e9,
    "beta_slow": 1e9,
    "attention_factor": 1e9,
    "query_pre_attn_scalar": 1e9,
    "attn_logit_softcapping": 1e9,
    "final_logit_softcapping": 1e9,
}


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary embedding of one kind of layer, with any scaling already worked into the frequencies."""

    inverse_frequencies: tuple[float, ...]  # [head_dim / 2] radians per position
    magnitude: float = 1.0  # factor on cosine and sine (yarn)

    def __post_init__(self) -> None:
        for value in (*self.inverse_frequencies, self.magnitude):
            if not (math.isfinite(value) and value > 0):
                raise CheckpointError(
                    f"the rotary settings give a frequency or magnitude of {value}; correct config.json"
                )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything the decoder's arithmetic depends on."""

    architecture: str
    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int  # positions the model was made for
    rms_norm_eps: float
    activation: str  # "silu", "gelu_tanh" or "gelu"
    attention_scale: float  # factor on the scores
    rotary: dict[str, RotaryConfig]  # by layer type
    layer_types: tuple[str, ...]  # [num_layers] "full_attention" or "sliding_attention"
    sliding_window: int | None = None  # keys a query of a sliding layer sees, its own included
    has_qkv_bias: bool = False
    has_output_bias: bool = False  # of the attention's output projection
    has_mlp_bias: bool = False
    has_qk_norm: bool = False  # RMSNorm over each query and key head (Qwen3, Gemma 3)
    has_sandwich_norms: bool = False  # norms after attention and MLP as well as before (Gemma)
    norm_adds_one: bool = False  # norm weights are stored minus one (Gemma)
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    ties_embeddings: bool = False  # the output head is the embedding table

    def window(self, layer: int) -> int | None:
        """Return how many keys a query of `layer` sees, or None for all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING_ATTENTION else None


def decoder_config_from(folder: Path) -> DecoderConfig:
    """Read `folder`/config.json. Raises `CheckpointError` naming what is missing, malformed or unsupported."""
    path = folder / "config.json"
    raw = read_json_object(path)
    _check_architecture(raw, path)
    try:
        _check_ranges(raw)
        from transformers import AutoConfig  # takes a second to import

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return decoder_config_from_hf(config.get_text_config(), architecture=SUPPORTED_ARCHITECTURES[raw["model_type"]])
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except Exception as error:  # transformers raises many kinds, and so does arithmetic on what it lets through
        reraise_interrupt(error)
        reason = _shortened(" ".join(str(error).split()) or type(error).__name__)  # the value is in a later line
        raise CheckpointError(
            f"{path} is not a valid model configuration: {reason}; download the model again"
        ) from error


def reraise_interrupt(error: BaseException) -> None:
    """Raise `KeyboardInterrupt` if `error` hides one: an interrupted lazy import in transformers is an ImportError."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        cause = pending.pop()
        if cause is None or id(cause) in seen:
            continue
        if isinstance(cause, KeyboardInterrupt):
            raise cause
        seen.add(id(cause))
        pending += [cause.__cause__, cause.__context__]


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object. Raises `CheckpointError` naming the file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a model folder needs it") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or a number too long
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; download the model again") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(raw).__name__}; download the model again")
    return raw


def decoder_config_from_hf(config: Any, *, architecture: str) -> DecoderConfig:
    """Reduce a transformers text configuration of one of the supported families. Raises `CheckpointError`."""
    family = config.model_type
    is_gemma = family.startswith("gemma")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads ({config.num_attention_heads}) is no multiple of num_key_value_heads "
            f"({num_kv_heads}); correct config.json"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise CheckpointError("use_bidirectional_attention (True) is not supported; use a causal decoder")
    if family == "gemma3_text" and config.attn_logit_softcapping is not None:
        raise CheckpointError(
            f"attn_logit_softcapping ({config.attn_logit_softcapping}) is not part of Gemma 3; set it to null"
        )
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"head_dim ({head_dim}) must be even, for rotation pairs it up; correct config.json")
    layer_types = _layer_types(config)
    has_bias = bool(getattr(config, "attention_bias", False))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.intermediate_size,
        max_position=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        activation=_activation(config),
        attention_scale=(config.query_pre_attn_scalar if is_gemma else head_dim) ** -0.5,
        rotary={kind: rotary_config_from_hf(config, kind, head_dim) for kind in sorted(set(layer_types))},
        layer_types=layer_types,
        sliding_window=config.sliding_window if SLIDING_ATTENTION in layer_types else None,
        has_qkv_bias=has_bias or family == "qwen2",
        has_output_bias=has_bias and family != "qwen2",
        has_mlp_bias=bool(getattr(config, "mlp_bias", False)),
        has_qk_norm=family in ("qwen3", "gemma3_text"),
        has_sandwich_norms=is_gemma,
        norm_adds_one=is_gemma,
        embedding_scale=config.hidden_size**0.5 if is_gemma else 1.0,
        attention_softcap=config.attn_logit_softcapping if family == "gemma2" else None,
        final_softcap=config.final_logit_softcapping if is_gemma else None,
        ties_embeddings=bool(config.tie_word_embeddings),
    )


def _check_architecture(raw: dict[str, Any], path: Path) -> None:
    supported = ", ".join(SUPPORTED_ARCHITECTURES.values())
    architectures, model_type = raw.get("architectures"), raw.get("model_type")
    if architectures is not None and not isinstance(architectures, list):
        raise CheckpointError(f"architectures ({architectures!r}) in {path} must be a list of names; correct it")
    if not isinstance(model_type, str) or model_type not in SUPPORTED_ARCHITECTURES:
        named = architectures or [f"model_type {model_type!r}"]
        raise CheckpointError(f"{path} describes an unsupported architecture ({named[0]}); supported: {supported}")
    expected = SUPPORTED_ARCHITECTURES[model_type]
    architectures = architectures or [expected]
    if expected not in architectures:
        raise CheckpointError(f"{path} describes an unsupported architecture ({architectures[0]}); use a {expected}")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{path} describes a quantised checkpoint (quant_method {method!r}), which is not supported; "
            "use the float16, bfloat16 or float32 weights of the model, or a GGUF file"
        )


def _check_ranges(settings: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for a number, here or in an inner object, that no model can have. None is let through."""
    for name, value in settings.items():
        if isinstance(value, dict):
            _check_ranges(value)
        elif value is None:
            continue
        elif name in _INTEGER_RANGES:
            low, high = _INTEGER_RANGES[name]
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise CheckpointError(
                    f"{name} ({_shortened(repr(value))}) must be an integer from {low} to {high}; correct config.json"
                )
        elif name in _POSITIVE_RANGES:
            limit = _POSITIVE_RANGES[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= limit:
                raise CheckpointError(
                    f"{name} ({_shortened(repr(value))}) must be over 0 and at most {limit:g}; correct config.json"
                )


def _shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:297]}..."


def _layer_types(config: Any) -> tuple[str, ...]:
    types = getattr(config, "layer_types", None)
    if types is None:  # Llama and Mistral: all layers alike
        kind = SLIDING_ATTENTION if getattr(config, "sliding_window", None) is not None else FULL_ATTENTION
        types = [kind] * config.num_hidden_layers
    unknown = [kind for kind in types if kind not in (FULL_ATTENTION, SLIDING_ATTENTION)]
    if unknown:
        raise CheckpointError(
            f"layer type {unknown[0]!r} is not supported; supported: {FULL_ATTENTION}, {SLIDING_ATTENTION}"
        )
    if len(types) != config.num_hidden_layers:
        raise CheckpointError(
            f"layer_types has {len(types)} entries for {config.num_hidden_layers} layers; correct config.json"
        )
    if SLIDING_ATTENTION in types and not config.sliding_window:
        raise CheckpointError(f"sliding_window ({config.sliding_window}) is needed by the layers; correct config.json")
    return tuple(types)


def _activation(config: Any) -> str:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in SUPPORTED_ACTIVATIONS:
        raise CheckpointError(f"activation {name!r} is not supported; supported: {', '.join(SUPPORTED_ACTIVATIONS)}")
    return SUPPORTED_ACTIVATIONS[name]


def rotary_config_from_hf(config: Any, layer_type: str, head_dim: int) -> RotaryConfig:
    """Work the `rope_parameters` of a transformers configuration into frequencies. Raises `CheckpointError`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    is_nested = layer_type in config.rope_parameters
    parameters = config.rope_parameters[layer_type] if is_nested else config.rope_parameters
    rope_type = parameters["rope_type"]
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise CheckpointError(f"rope type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
    partial = parameters.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise CheckpointError(f"partial_rotary_factor ({partial}) is not supported; only whole heads are rotated")
    _check_ranges(parameters)
    if rope_type == "llama3" and not parameters["low_freq_factor"] < parameters["high_freq_factor"]:
        raise CheckpointError(
            f"low_freq_factor ({parameters['low_freq_factor']}) must be under high_freq_factor "
            f"({parameters['high_freq_factor']}); correct config.json"
        )
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return RotaryConfig(inverse_frequencies=tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()))
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope_type](
        config, torch.device("cpu"), layer_type=layer_type if is_nested else None
    )
    return RotaryConfig(inverse_frequencies=tuple(frequencies.tolist()), magnitude=float(magnitude))
