"""Building blocks of the decoder: packed linear maps, RMSNorm, rotary embedding, gated MLP.

T tokens in the flattened batch, D hidden size, N heads, Dh head dimension. All run without autograd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.models.kernels import FLOAT_FORMATS, BlockRows, KernelMatrix, WeightFormat, can_run
from dspark.models.model_config import RotaryConfig


class PackedLinear:
    """A linear map whose weight is laid out once, at load, for the kernel that will multiply it.

    `F.linear` on CPU lays the weight out again at each call with few rows, which costs as much as the product.
    """

    def __init__(
        self, weight: Tensor | BlockRows, bias: Tensor | None = None, *, weight_format: WeightFormat | None = None
    ) -> None:
        """Take `weight` [out, in]; where it is laid out anew it is copied, so the caller may drop it.

        The compiled kernels keep float32 weights in `weight_format`; None: the smallest float format that is exact.
        """
        self.num_outputs, self.num_inputs = weight.shape
        self._bias = bias
        self._matrix: KernelMatrix | None = None
        if isinstance(weight, BlockRows) or can_run(weight.device, weight.dtype):
            self._matrix = KernelMatrix(weight, weight_format)
            self.min_rows = 1
            return
        assert weight_format in (None, FLOAT_FORMATS.get(weight.dtype)), (weight_format, weight.dtype)
        self._is_packed = _can_pack(weight)
        # Fewer rows are padded here; who has several products to make pads once.
        self.min_rows = _min_packed_rows(weight.dtype) if self._is_packed else 1
        with torch.no_grad():
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._is_packed else weight

    @property
    def has_kernel(self) -> bool:
        """Whether the compiled kernels hold the weight."""
        return self._matrix is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a product reads."""
        if self._matrix is not None:
            return self._matrix.num_bytes
        return self.num_outputs * self.num_inputs * self._weight.dtype.itemsize

    def __call__(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        if self._matrix is not None:
            return self._matrix.product(x.contiguous(), self._bias)
        if not self._is_packed:
            return F.linear(x, self._weight, self._bias)
        num_rows = x.shape[0]
        if num_rows < self.min_rows:
            x = F.pad(x, (0, 0, 0, self.min_rows - num_rows))
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")[:num_rows]

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add the map of `x` [T, in] to `y` [T, out] in place."""
        if self._matrix is not None and y.is_contiguous():
            self._matrix.add_product(y, x.contiguous(), self._bias)
        else:
            y.add_(self(x))

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows `ids` [n] of the weight, [n, in]; a look-up where the layout is plain or the kernels'."""
        return self._matrix.rows(ids) if self._matrix is not None else F.embedding(ids, self.unpacked_weight())

    def unpacked_weight(self) -> Tensor:
        """Return the weight [out, in] in plain layout: a copy where it was packed, the very memory where not."""
        if self._matrix is not None:
            return self._matrix.dense()
        return self._weight.to_dense() if self._is_packed else self._weight


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.float32:
        return True
    return weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _min_packed_rows(dtype: torch.dtype) -> int:
    """Return how many rows a packed product should have at least.

    With AVX-512 the float32 kernel reads the weights about 15 % slower for one to three rows than for four, so
    padding pays; with AVX2 fewer rows are faster. A rule, not a measurement: two runs must not round differently.
    """
    return 4 if dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() == "AVX512" else 1


class RMSNorm:
    """Root-mean-square norm with a weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float, *, adds_one: bool = False) -> None:
        """`adds_one`: the weight is stored minus one (Gemma) and then applied in float32, as Gemma does."""
        self._in_float32 = adds_one
        self._weight = weight.float() + 1.0 if adds_one else weight
        self._has_kernel = can_run(weight.device, self._weight.dtype)
        self._shape = weight.shape
        self._eps = eps
        self._eps_tensor = torch.full((1, 1), eps, dtype=self._weight.dtype, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:  # [T, D]
        if self._has_kernel and x.dtype == torch.float32:
            normed: Tensor = torch.ops.dspark.rms_norm(x.contiguous(), self._weight, self._eps)
            return normed
        if self._in_float32 and x.dtype != torch.float32:
            return F.rms_norm(x.float(), self._shape, self._weight, self._eps).to(x.dtype)
        if x.dtype == torch.float32 and x.device.type == "cpu":
            # There F.rms_norm is a chain of nine small operations; two norms a layer make that felt at one token.
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            scale = torch.addcmul(self._eps_tensor, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
            return torch.mul(x, scale).mul_(self._weight)
        return F.rms_norm(x, self._shape, self._weight, self._eps)


class HeadNorm:
    """RMSNorm over each query and key head at once; queries and keys have weights of their own."""

    def __init__(
        self, query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float, *, adds_one: bool
    ) -> None:
        rows = [query_weight] * num_heads + [key_weight] * num_kv_heads
        weight = torch.stack(rows)  # [N, Dh]
        self._in_float32 = adds_one
        self._weight = weight.float() + 1.0 if adds_one else weight
        self._shape = query_weight.shape
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:  # [T, N, Dh]
        if self._in_float32 and x.dtype != torch.float32:
            return F.rms_norm(x.float(), self._shape, None, self._eps).mul_(self._weight).to(x.dtype)
        return F.rms_norm(x, self._shape, None, self._eps).mul_(self._weight)


class Rotary:
    """Rotary position embedding as a complex product over pairs (2i, 2i + 1) of a head.

    Checkpoints pair (i, i + Dh/2); `pair_rows` reorders the rows of the query and key projections at load.
    Scores do not change when queries and keys are reordered alike, and one complex product replaces six operations.
    """

    def __init__(self, config: RotaryConfig, device: torch.device) -> None:
        self._inverse_frequencies = torch.tensor(config.inverse_frequencies, dtype=torch.float32, device=device)
        self._magnitude = torch.tensor(config.magnitude, dtype=torch.float32, device=device)

    def phases(self, positions: Tensor) -> Tensor:
        """Return the rotations of `positions` [T] as complex64 [T, 1, Dh/2], shared by all layers of a step."""
        angles = positions[:, None, None].float() * self._inverse_frequencies
        return torch.polar(self._magnitude.expand_as(angles), angles)


def rotate(x: Tensor, phases: Tensor) -> Tensor:
    """Rotate heads `x` [T, N, Dh] by `phases` [T, 1, Dh/2]; float32 input is changed in place and returned."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    rotated = torch.view_as_real(pairs.mul_(phases)).flatten(-2)
    return rotated.to(x.dtype)


def pair_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of a query or key projection [N * Dh, ...] so that rotary partners stand side by side."""
    halves = rows.unflatten(0, (-1, 2, head_dim // 2))
    return halves.transpose(1, 2).reshape(rows.shape)


class GatedMlp:
    """activation(gate) * up, projected down, with gate and up in one product."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self._activation = activation
        self._activate = ACTIVATIONS[activation]

    def inner(self, x: Tensor) -> Tensor:  # [T, D] -> [T, inner size]
        """Return what `down` is applied to."""
        gate_up = self.gate_up(x)
        if self._activation == "silu" and self.gate_up.has_kernel:
            inner: Tensor = torch.ops.dspark.silu_mul(gate_up)
            return inner
        gate, up = gate_up.chunk(2, dim=-1)
        return self._activate(gate).mul_(up)

    def __call__(self, x: Tensor) -> Tensor:  # [T, D]
        return self.down(self.inner(x))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
