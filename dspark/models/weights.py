"""Decoder weights from safetensors: read tensor by tensor, checked against the configuration, packed at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.errors import CheckpointError, ConfigError
from dspark.models.decoder import Decoder, DecoderLayer
from dspark.models.gguf_blocks import BlockFile, open_blocks
from dspark.models.kernels import BlockRows, WeightFormat, can_run, dtype_name, instruction_set
from dspark.models.layers import GatedMlp, HeadNorm, PackedLinear, RMSNorm, pair_rows
from dspark.models.model_config import DecoderConfig, decoder_config_from, read_json_object

STORED_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Parts of multimodal checkpoints that a text decoder does without.
_OTHER_TOWERS = ("vision_tower.", "multi_modal_projector.")
_HEAD = "lm_head.weight"


def load_decoder(folder: Path, *, dtype: torch.dtype, device: torch.device, weights: str = "auto") -> Decoder:
    """Load the decoder in `folder` (config.json and safetensors, one file or sharded with an index).

    `weights` says how the compiled kernels hold matrices, where they run (`config.WEIGHTS`); "auto": as the checkpoint
    has them, exactly. Raises `CheckpointError` naming the file or tensor that is missing, unexpected, ill-shaped,
    quantised or damaged, and `ConfigError` for weights that cannot be had here.
    """
    config = decoder_config_from(folder)
    tensors = CheckpointTensors(folder, canonical_name=_canonical_name)
    tensors.check(_expected_shapes(config), optional={_HEAD})  # a tied head may be stored; transformers ignores it too
    reader = _Reader(tensors, open_blocks(folder), dtype, device, weights)
    with torch.inference_mode(False), torch.no_grad():
        head = reader.linear("model.embed_tokens" if config.ties_embeddings else "lm_head")
        # A tied embedding is looked up in the kernels' matrix, and takes no memory of its own.
        is_shared = config.ties_embeddings and head.has_kernel
        return Decoder(
            config,
            embedding=None if is_shared else reader.tensor("model.embed_tokens.weight"),
            layers=[_load_layer(config, f"model.layers.{index}.", reader) for index in range(config.num_layers)],
            final_norm=reader.norm("model.norm", config),
            head=head,
            dtype=dtype,
            device=device,
        )


class _Reader:
    """Reads the tensors of a checkpoint, and puts matrices into the form that `weights` asks for."""

    def __init__(
        self,
        tensors: CheckpointTensors,
        blocks: BlockFile | None,
        dtype: torch.dtype,
        device: torch.device,
        weights: str,
    ) -> None:
        self._tensors = tensors
        self._dtype, self._device = dtype, device
        has_kernels = can_run(device, dtype)
        if not has_kernels and weights not in ("auto", dtype_name(dtype)):
            raise ConfigError(
                f"weights in {weights} need the compiled kernels, which compute in float32 on a CPU with AVX2; this is "
                f"{dtype_name(dtype)} on {device}{'' if instruction_set() else ' without them'}; use --weights auto"
            )
        if weights == "gguf" and blocks is None:
            raise ConfigError(
                "weights 'gguf' are the blocks of a GGUF file in Q4_0, Q4_1 or Q8_0, and this model has none; use "
                "--weights auto, or such a file as --model"
            )
        self._blocks = blocks if has_kernels and weights in ("auto", "gguf") else None
        self._format = WeightFormat[weights.upper()] if has_kernels and weights not in ("auto", "gguf") else None

    def tensor(self, name: str) -> Tensor:
        """Return a copy, for the stored tensor is a window on the memory-mapped file."""
        return self._tensors.read(name).to(device=self._device, dtype=self._dtype, copy=True)

    def norm(self, name: str, config: DecoderConfig) -> RMSNorm:
        """Return the norm with the weight of `name`."""
        return RMSNorm(self.tensor(f"{name}.weight"), config.rms_norm_eps, adds_one=config.norm_adds_one)

    def linear(self, *names: str, has_bias: bool = False, num_rotated: int = 0, head_dim: int = 0) -> PackedLinear:
        """Return the maps `names` side by side, the first `num_rotated` in rotary order of heads of `head_dim`."""

        def fused(parts: Iterable[Tensor]) -> Tensor:
            ordered = [pair_rows(part, head_dim) if i < num_rotated else part for i, part in enumerate(parts)]
            return torch.cat(ordered)

        weight: Tensor | BlockRows | None = None if self._blocks is None else _fused_blocks(self._blocks, names, fused)
        if weight is None:
            weight = fused(self.tensor(f"{name}.weight") for name in names)
        bias = fused(self.tensor(f"{name}.bias") for name in names) if has_bias else None
        return PackedLinear(weight, bias, weight_format=self._format)


def _fused_blocks(
    blocks: BlockFile, names: Sequence[str], fused: Callable[[Iterable[Tensor]], Tensor]
) -> BlockRows | None:
    """Return the blocks of the maps `names` side by side; None where one has none or they differ in format."""
    parts = [blocks.read(f"{name}.weight") for name in names]
    known = [part for part in parts if part is not None]
    formats = {part.format for part in known}
    if len(known) < len(parts) or len(formats) > 1:
        return None
    return BlockRows(formats.pop(), fused(part.blocks for part in known))


def _load_layer(config: DecoderConfig, prefix: str, reader: _Reader) -> DecoderLayer:
    head_norm = None
    if config.has_qk_norm:
        query_norm, key_norm = (
            pair_rows(reader.tensor(f"{prefix}self_attn.{name}_norm.weight"), config.head_dim) for name in ("q", "k")
        )
        head_norm = HeadNorm(
            query_norm,
            key_norm,
            config.num_heads,
            config.num_kv_heads,
            config.rms_norm_eps,
            adds_one=config.norm_adds_one,
        )

    def norm(name: str) -> RMSNorm:
        return reader.norm(f"{prefix}{name}_layernorm", config)

    def linear(*names: str, has_bias: bool, **rotary: int) -> PackedLinear:
        return reader.linear(*(f"{prefix}{name}_proj" for name in names), has_bias=has_bias, **rotary)

    gemma = config.has_sandwich_norms
    attention = [f"self_attn.{name}" for name in ("q", "k", "v")]
    return DecoderLayer(
        input_norm=norm("input"),
        qkv=linear(*attention, has_bias=config.has_qkv_bias, num_rotated=2, head_dim=config.head_dim),
        head_norm=head_norm,
        output=linear("self_attn.o", has_bias=config.has_output_bias),
        post_attention_norm=norm("post_attention") if gemma else None,
        mlp_norm=norm("pre_feedforward" if gemma else "post_attention"),
        mlp=GatedMlp(
            linear("mlp.gate", "mlp.up", has_bias=config.has_mlp_bias),
            linear("mlp.down", has_bias=config.has_mlp_bias),
            config.activation,
        ),
        post_mlp_norm=norm("post_feedforward") if gemma else None,
    )


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
            raise CheckpointError(
                f"tensor {stored_name} in {path} is stored as {dtype_name(tensor.dtype)}; quantised weights are "
                "not supported, use float32, float16 or bfloat16 ones"
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
