"""The compiled kernels of `csrc/`, where this build and this CPU have them, and weights laid out for them.

N outputs, K inputs of a matrix. A panel holds 16 outputs side by side (`csrc/kernels.h` has the layouts).
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import first_line

logger = logging.getLogger(__name__)

_MISSING = "running without compiled kernels: slower, and rounding depends on the batch"

LANES = 16
BLOCK = 32  # inputs that share a scale in GGUF's block formats


class WeightFormat(IntEnum):
    """How the kernels store a matrix; the numbers are theirs."""

    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    INT8 = 3  # with a scale per output
    Q8_0 = 4
    Q4_0 = 5
    Q4_1 = 6


FLOAT_FORMATS = {
    torch.float16: WeightFormat.FLOAT16,
    torch.bfloat16: WeightFormat.BFLOAT16,
    torch.float32: WeightFormat.FLOAT32,
}
# Bytes of a block: its half-precision scales, then its numbers.
BLOCK_BYTES = {WeightFormat.Q8_0: 2 + 32, WeightFormat.Q4_0: 2 + 16, WeightFormat.Q4_1: 4 + 16}


@functools.cache
def instruction_set() -> str:
    """Return what the kernels run on, "AVX-512" or "AVX2"; "" where there are none, which the log says once."""
    try:
        importlib.import_module("dspark._kernels")  # registers the operators
    except ImportError as error:
        logger.info("%s (%s)", _MISSING, first_line(error))
        return ""
    name: str = torch.ops.dspark.instruction_set()
    if not name:
        logger.info("%s (they need AVX2, FMA and F16C)", _MISSING)
    return name


def can_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels serve tensors of this device and type."""
    return device.type == "cpu" and dtype == torch.float32 and bool(instruction_set())


@dataclass(frozen=True)
class BlockRows:
    """A matrix [N, K] in the blocks of a GGUF file, its rows in any order."""

    format: WeightFormat
    blocks: Tensor  # [N, K / 32, bytes] uint8

    def __post_init__(self) -> None:
        assert self.blocks.dim() == 3 and self.blocks.shape[2] == BLOCK_BYTES[self.format], (
            self.format,
            self.blocks.shape,
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.blocks.shape[1] * BLOCK

    def __getitem__(self, rows: Tensor) -> BlockRows:
        return BlockRows(self.format, self.blocks[rows])

    def dense(self) -> Tensor:
        """Return the matrix in float32: the values that the file means."""
        scale = self._halves(0)
        if self.format == WeightFormat.Q8_0:
            return (self.blocks[:, :, 2:].view(torch.int8).float() * scale).flatten(1)
        has_min = self.format == WeightFormat.Q4_1
        shift = self._halves(2) if has_min else -8.0 * scale
        # A product of 4 and 11 bits is exact, so that this rounds once, as the kernels' fused multiply-add does.
        return (self.numbers().float() * scale + shift).flatten(1)

    def numbers(self) -> Tensor:
        """Return the 4-bit numbers [N, K / 32, 32] uint8: the low halves of a block's bytes, then the high ones."""
        halves = self.blocks[:, :, BLOCK_BYTES[self.format] - BLOCK // 2 :]
        return torch.cat([halves & 15, halves >> 4], dim=2)

    def scales(self) -> list[Tensor]:
        """Return the half-precision scales, and minima where the format has them, [N, K / 32] each."""
        places = (0, 2) if self.format == WeightFormat.Q4_1 else (0,)
        return [self._halves(place, dtype=torch.float16).squeeze(2) for place in places]

    def _halves(self, place: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.blocks[:, :, place : place + 2].contiguous().view(torch.float16).to(dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32, and so on."""
    return str(dtype).removeprefix("torch.")


def exact_dtype(weight: Tensor) -> torch.dtype:
    """Return the smallest float type that holds each value of `weight` exactly."""
    for dtype in FLOAT_FORMATS:
        if torch.equal(weight.to(dtype).to(weight.dtype), weight):
            return dtype
    return weight.dtype  # not even itself: it holds what is no number


def exact_format(weight: Tensor) -> WeightFormat:
    """Return the smallest float format that holds each value of `weight`, at most float32, exactly."""
    return FLOAT_FORMATS[exact_dtype(weight)]


class KernelMatrix:
    """A matrix [N, K] laid out for the kernels. Float32 sums; a row of a product depends on that row alone."""

    def __init__(self, weight: Tensor | BlockRows, weight_format: WeightFormat | None = None) -> None:
        """Take dense float weights, by default in the smallest exact format, or blocks, which stay as they are."""
        self.num_outputs, self.num_inputs = weight.shape
        self._scales: Tensor | None = None
        if isinstance(weight, BlockRows):
            assert weight_format in (None, weight.format), (weight_format, weight.format)
            self.format = weight.format
            self._packed = _packed_blocks(weight)
            return
        self.format = exact_format(weight) if weight_format is None else weight_format
        if self.format == WeightFormat.INT8:
            self._scales = _padded(weight.float().abs().amax(dim=1, keepdim=True) / 127.0).flatten().contiguous()
            steps = self._scales[: self.num_outputs, None].clamp_min(torch.finfo(torch.float32).tiny)
            self._packed = _panels((weight.float() / steps).round_().to(torch.int8))
        else:
            dtype = next(dtype for dtype, known in FLOAT_FORMATS.items() if known == self.format)
            self._packed = _panels(weight.to(dtype))

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        return self._packed.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x [T, K] float32 times the matrix, plus the bias [N]: [T, N]."""
        result: Tensor = torch.ops.dspark.linear(
            x, self._packed, self._scales, bias, int(self.format), self.num_outputs
        )
        return result

    def add_product(self, y: Tensor, x: Tensor, bias: Tensor | None = None) -> None:
        """Add that product to y [T, N], which is contiguous."""
        torch.ops.dspark.linear_add(y, x, self._packed, self._scales, bias, int(self.format))

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` [n] int64 in float32, [n, K]."""
        result: Tensor = torch.ops.dspark.unpack_rows(
            self._packed, self._scales, int(self.format), self.num_inputs, self.num_outputs, ids
        )
        return result

    def dense(self) -> Tensor:
        """Return the whole matrix in float32, a copy."""
        return self.rows(torch.arange(self.num_outputs))


def _padded(rows: Tensor) -> Tensor:
    missing = -rows.shape[0] % LANES
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _panels(numbers: Tensor) -> Tensor:
    """Lay out [N, K] as [panels, K, 16]."""
    return _padded(numbers).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()


def _packed_blocks(rows: BlockRows) -> Tensor:
    """Lay out blocks as [panels, K / 32, bytes]: the scales of 16 outputs, then their numbers."""
    num_blocks = rows.blocks.shape[1]
    heads = [_panels(scales).view(torch.uint8) for scales in rows.scales()]  # [panels, K / 32, 2 * 16] each
    if rows.format == WeightFormat.Q8_0:
        numbers = _panels(rows.blocks[:, :, 2:].flatten(1))
    else:  # eight neighbours in a word, the first one lowest: CPUs with these kernels are little-endian
        low, high = rows.numbers().unflatten(2, (-1, 2)).unbind(3)
        words = (low | (high << 4)).view(torch.int32)
        numbers = _panels(words.flatten(1)).view(torch.uint8)
    body = numbers.flatten(1).unflatten(1, (num_blocks, -1))
    return torch.cat([*heads, body], dim=2).contiguous()
