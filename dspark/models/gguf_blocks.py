"""The quantised blocks of a GGUF file, kept beside its dequantised weights so that kernels can compute from them.

Blocks are written under the name of the dense matrix [N, K] that they mean, row by row: a file that orders or means
them otherwise is noticed when they are written, and its matrix is left to the dense weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.errors import CheckpointError
from dspark.models.kernels import BLOCK_BYTES, BlockRows, WeightFormat
from dspark.models.layers import pair_rows

BLOCKS_NAME = "gguf_blocks.safetensors"

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_TABLES = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}


def write_blocks(gguf_path: Path, folder: Path, tensors: Mapping[str, Tensor], *, head_dim: int) -> None:
    """Write the blocks of those `tensors` (dense, by name) that the file holds in a format of the kernels."""
    from gguf import GGUFReader

    stored = {tensor.name: tensor for tensor in GGUFReader(gguf_path).tensors}
    blocks: dict[str, Tensor] = {}
    formats: dict[str, str] = {}
    for name, dense in tensors.items():
        source = stored.get(_gguf_name(name))
        if source is None or source.tensor_type.name not in WeightFormat.__members__:
            continue
        weight_format = WeightFormat[source.tensor_type.name]
        if weight_format not in BLOCK_BYTES:
            continue
        raw = torch.from_numpy(source.data.copy()).view(torch.uint8)
        rows = BlockRows(weight_format, raw.view(dense.shape[0], -1, BLOCK_BYTES[weight_format]))
        ordered = _in_order_of(dense.float(), rows, head_dim)
        if ordered is not None:
            blocks[name], formats[name] = ordered.blocks.contiguous(), weight_format.name
    if blocks:
        save_file(blocks, folder / BLOCKS_NAME, metadata=formats)


class BlockFile:
    """The blocks in a converted folder, by the name of their matrix."""

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises `CheckpointError` when it is damaged."""
        self._path = path
        try:
            self._file = safe_open(path, framework="pt")
            self._formats: dict[str, str] = self._file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; remove its folder, it is then made again") from error

    def read(self, name: str) -> BlockRows | None:
        """Return the blocks of the matrix `name`; None where there are none."""
        if name not in self._formats:
            return None
        try:
            return BlockRows(WeightFormat[self._formats[name]], self._file.get_tensor(name))
        except (SafetensorError, OSError, KeyError) as error:
            raise CheckpointError(f"{name} in {self._path} cannot be read: {error}; remove the folder") from error


def open_blocks(folder: Path) -> BlockFile | None:
    """Return the blocks in a model's folder, if it was made from a GGUF file that has some."""
    path = folder / BLOCKS_NAME
    return BlockFile(path) if path.exists() else None


def _gguf_name(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return _GGUF_TABLES.get(name, "")
    return f"blk.{layer[1]}.{_GGUF_NAMES.get(layer[2], '')}.weight"


def _in_order_of(dense: Tensor, rows: BlockRows, head_dim: int) -> BlockRows | None:
    """Return `rows` in the order of `dense`; None where they do not mean the same numbers."""
    meant = rows.dense()
    if torch.equal(meant, dense):
        return rows
    # GGUF keeps queries and keys of the Llama family with rotary partners side by side.
    if dense.shape[0] % head_dim == 0 and torch.equal(meant, pair_rows(dense, head_dim)):
        places = pair_rows(torch.arange(dense.shape[0]), head_dim)
        return rows[places.argsort()]
    return None
