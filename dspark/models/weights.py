"""Decoder weights from safetensors: read tensor by tensor, checked against the configuration, packed at once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.decoder import Decoder, DecoderLayer
from dspark.models.layers import GatedMlp, HeadNorm, PackedLinear, RMSNorm, pair_rows
from dspark.models.model_config import DecoderConfig, decoder_config_from, read_json_object

STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Parts of multimodal checkpoints that a text decoder does without.
_OTHER_TOWERS = ("vision_tower.", "multi_modal_projector.")
_HEAD = "lm_head.weight"

TensorReader = Callable[[str], Tensor]


def load_decoder(folder: Path, *, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Load the decoder in `folder` (config.json and safetensors, one file or sharded with an index).

    Raises `CheckpointError` naming the file or tensor that is missing, unexpected, ill-shaped, quantised or damaged.
    """
    config = decoder_config_from(folder)
    tensors = CheckpointTensors(folder, canonical_name=_canonical_name)
    tensors.check(_expected_shapes(config), optional={_HEAD})  # a tied head may be stored; transformers ignores it too

    def read(name: str) -> Tensor:
        # A copy, for the stored tensor is a window on the memory-mapped file.
        return tensors.read(name).to(device=device, dtype=dtype, copy=True)

    with torch.inference_mode(False), torch.no_grad():
        embedding = read("model.embed_tokens.weight")
        head_weight = embedding if config.ties_embeddings else read(_HEAD)
        return Decoder(
            config,
            embedding=embedding,
            layers=[_load_layer(config, f"model.layers.{index}.", read) for index in range(config.num_layers)],
            final_norm=_load_norm(config, "model.norm.weight", read),
            head=PackedLinear(head_weight),
        )


def _load_layer(config: DecoderConfig, prefix: str, read: TensorReader) -> DecoderLayer:
    head_norm = None
    if config.has_qk_norm:
        query_norm, key_norm = (
            pair_rows(read(f"{prefix}self_attn.{name}_norm.weight"), config.head_dim) for name in ("q", "k")
        )
        head_norm = HeadNorm(
            query_norm,
            key_norm,
            config.num_heads,
            config.num_kv_heads,
            config.rms_norm_eps,
            adds_one=config.norm_adds_one,
        )
    gemma = config.has_sandwich_norms
    mlp_norm = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    return DecoderLayer(
        input_norm=_load_norm(config, f"{prefix}input_layernorm.weight", read),
        qkv=_load_qkv(config, f"{prefix}self_attn.", read),
        head_norm=head_norm,
        output=_load_linear(f"{prefix}self_attn.o_proj", read, has_bias=config.has_output_bias),
        post_attention_norm=_load_norm(config, f"{prefix}post_attention_layernorm.weight", read) if gemma else None,
        mlp_norm=_load_norm(config, f"{prefix}{mlp_norm}.weight", read),
        mlp=GatedMlp(
            _load_fused(f"{prefix}mlp.", ("gate_proj", "up_proj"), read, has_bias=config.has_mlp_bias),
            _load_linear(f"{prefix}mlp.down_proj", read, has_bias=config.has_mlp_bias),
            config.activation,
        ),
        post_mlp_norm=_load_norm(config, f"{prefix}post_feedforward_layernorm.weight", read) if gemma else None,
    )


def _load_norm(config: DecoderConfig, name: str, read: TensorReader) -> RMSNorm:
    return RMSNorm(read(name), config.rms_norm_eps, adds_one=config.norm_adds_one)


def _load_linear(name: str, read: TensorReader, *, has_bias: bool) -> PackedLinear:
    return PackedLinear(read(f"{name}.weight"), read(f"{name}.bias") if has_bias else None)


def _load_fused(prefix: str, names: tuple[str, ...], read: TensorReader, *, has_bias: bool) -> PackedLinear:
    weight = torch.cat([read(f"{prefix}{name}.weight") for name in names])
    return PackedLinear(weight, torch.cat([read(f"{prefix}{name}.bias") for name in names]) if has_bias else None)


def _load_qkv(config: DecoderConfig, prefix: str, read: TensorReader) -> PackedLinear:
    def fused(kind: str) -> Tensor:
        queries, keys, values = (read(f"{prefix}{name}_proj.{kind}") for name in ("q", "k", "v"))
        return torch.cat([pair_rows(queries, config.head_dim), pair_rows(keys, config.head_dim), values])

    return PackedLinear(fused("weight"), fused("bias") if config.has_qkv_bias else None)


def _expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    rows = {
        "self_attn.q_proj": (config.num_heads * head_dim, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (config.num_kv_heads * head_dim, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (config.num_kv_heads * head_dim, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, config.num_heads * head_dim, config.has_output_bias),
        "mlp.gate_proj": (config.intermediate_size, hidden, config.has_mlp_bias),
        "mlp.up_proj": (config.intermediate_size, hidden, config.has_mlp_bias),
        "mlp.down_proj": (hidden, config.intermediate_size, config.has_mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.has_sandwich_norms:
        norms |= {"pre_feedforward_layernorm": hidden, "post_feedforward_layernorm": hidden}
    if config.has_qk_norm:
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        for name, (num_outputs, num_inputs, has_bias) in rows.items():
            shapes[f"{prefix}{name}.weight"] = (num_outputs, num_inputs)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (num_outputs,)
        for name, size in norms.items():
            shapes[f"{prefix}{name}.weight"] = (size,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.ties_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    return shapes


class CheckpointTensors:
    """The tensors of a folder by canonical name, over one safetensors file or several.

    `canonical_name` maps a stored name to it, or to None for what is ignored.
    """

    def __init__(self, folder: Path, *, canonical_name: Callable[[str], str | None]) -> None:
        self._folder = folder
        self._files = {path: _open(path) for path in _safetensors_files(folder)}
        self._homes: dict[str, tuple[Path, str]] = {}
        for path, file in self._files.items():
            for stored_name in sorted(file.keys()):
                name = canonical_name(stored_name)
                if name is not None:
                    self._homes[name] = (path, stored_name)

    @property
    def names(self) -> Collection[str]:
        return self._homes.keys()

    def check(self, shapes: dict[str, tuple[int, ...]], *, optional: Collection[str] = ()) -> None:
        """Raise `CheckpointError` unless the tensors are those of `shapes` and perhaps `optional`; nothing is read."""
        for name, shape in shapes.items():
            if name not in self._homes:
                raise CheckpointError(f"tensor {name} is missing in {self._folder}; download the model again")
            path, stored_name = self._homes[name]
            found = tuple(self._files[path].get_slice(stored_name).get_shape())
            if found != shape:
                raise CheckpointError(
                    f"tensor {stored_name} in {path} has shape {list(found)}, config.json asks for {list(shape)}; "
                    "the weights and config.json are not of the same model"
                )
        unexpected = sorted(self._homes.keys() - shapes.keys() - set(optional))
        if unexpected:
            path, stored_name = self._homes[unexpected[0]]
            raise CheckpointError(
                f"tensor {stored_name} in {path} is not part of the model in config.json ({len(unexpected)} such "
                "tensors); the weights and config.json are not of the same model"
            )

    def read(self, name: str, *, dtypes: Collection[torch.dtype] = STORED_DTYPES) -> Tensor:
        """Return a tensor on the memory-mapped file. Raises `CheckpointError` unless it is of one of `dtypes`."""
        path, stored_name = self._homes[name]
        try:
            tensor = self._files[path].get_tensor(stored_name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"tensor {stored_name} in {path} cannot be read: {error}") from error
        if tensor.dtype not in dtypes:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(
                f"tensor {stored_name} in {path} is stored as {kind}; quantised weights are not supported, "
                "use float32, float16 or bfloat16 ones"
            )
        return tensor


def _safetensors_files(folder: Path) -> list[Path]:
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        weight_map = read_json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(
                f"{index_path} has no weight_map of tensor names to file names; download the model again"
            )
        names = sorted(set(weight_map.values()))
        for name in names:  # a path could lead to another model's file, or out of the folder
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{index_path} names the shard {name!r}; shards must be .safetensors files beside the index, "
                    "download the model again"
                )
        paths = [folder / name for name in names]
        for path in paths:
            if not path.exists():
                raise CheckpointError(f"{path} does not exist but {index_path.name} names it; download it")
        return paths
    path = folder / "model.safetensors"
    if not path.exists():
        raise CheckpointError(
            f"{folder} has no model.safetensors and no {index_path.name}; save the model in safetensors format"
        )
    return [path]


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file: {error}; download it again") from error


def _canonical_name(stored_name: str) -> str | None:
    """Return the name in a plain causal decoder, or None for what it does not use."""
    # Multimodal Gemma 3 is stored as language_model.model.X by older savers, model.language_model.X by newer ones.
    name = stored_name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
    if name.endswith("rotary_emb.inv_freq") or name.removeprefix("model.").startswith(_OTHER_TOWERS):
        return None
    return name
