"""The building blocks equal their textbook definitions."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dspark.models.layers import GatedMlp, HeadNorm, PackedLinear, RMSNorm, Rotary, pair_rows, rotate
from dspark.models.model_config import RotaryConfig

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_linear_equals_linear(num_rows: int, has_bias: bool) -> None:
    weight, bias = torch.randn(24, 16), torch.randn(24) if has_bias else None
    x = torch.randn(num_rows, 16)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(weight, bias)(x), F.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_packed_linear_keeps_a_16_bit_type(dtype: torch.dtype) -> None:
    weight, x = torch.randn(24, 16).to(dtype), torch.randn(3, 16).to(dtype)
    with torch.inference_mode():
        got = PackedLinear(weight)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), x.float() @ weight.float().T, atol=0.1, rtol=0.02)


def test_packed_linear_does_not_look_at_the_weight_again() -> None:
    weight = torch.eye(4)
    linear = PackedLinear(weight)
    weight.zero_()
    with torch.inference_mode():
        assert linear(torch.ones(1, 4)).tolist() == [[1.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_linear_gives_its_weight_back(dtype: torch.dtype) -> None:
    weight = torch.randn(37, 20).to(dtype)
    assert torch.equal(PackedLinear(weight).unpacked_weight(), weight)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm = RMSNorm(torch.tensor([1.0, 2.0]), eps=0.0)
    assert norm(torch.tensor([[3.0, 4.0]])).tolist()[0] == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_torch_for_small_and_large_rows(dtype: torch.dtype) -> None:
    """Where the mean square is below eps, eps must count."""
    x = (torch.randn(5, 24) * torch.tensor([[0.0], [1e-4], [1.0], [100.0], [1e4]])).to(dtype)
    weight = torch.randn(24).to(dtype)
    torch.testing.assert_close(RMSNorm(weight, eps=1e-5)(x), F.rms_norm(x, (24,), weight, 1e-5))


def test_gemma_norm_adds_one_to_its_weight_in_float32() -> None:
    """1 + 2^-9 is no bfloat16 number; its effect must not be lost before the product."""
    weight = torch.full((2,), 2.0**-9, dtype=torch.bfloat16)
    norm = RMSNorm(weight, eps=0.0, adds_one=True)
    x = torch.tensor([[1.0078125, 1.0078125]], dtype=torch.bfloat16)
    assert norm(x.float()).tolist()[0] == pytest.approx([1 + 2.0**-9] * 2)
    assert norm(x).dtype == torch.bfloat16


def test_head_norm_gives_queries_and_keys_their_own_weight() -> None:
    norm = HeadNorm(torch.full((4,), 2.0), torch.full((4,), 3.0), 2, 1, 0.0, adds_one=False)
    assert norm(torch.ones(1, 3, 4))[0, :, 0].tolist() == [2.0, 2.0, 3.0]


def test_paired_rows_put_rotary_partners_side_by_side() -> None:
    rows = torch.arange(8.0)  # two heads of four: partners are (0, 2), (1, 3), (4, 6), (5, 7)
    assert pair_rows(rows, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_rotation_turns_each_pair_by_position_times_frequency() -> None:
    rotary = Rotary(RotaryConfig(inverse_frequencies=(0.5,), magnitude=2.0), CPU)
    turned = rotate(torch.tensor([[[1.0, 0.0]]]), rotary.phases(torch.tensor([3])))
    assert turned.flatten().tolist() == pytest.approx([2 * math.cos(1.5), 2 * math.sin(1.5)])


def test_rotation_keeps_a_16_bit_type() -> None:
    rotary = Rotary(RotaryConfig(inverse_frequencies=(1.0,)), CPU)
    turned = rotate(torch.ones(2, 1, 2, dtype=torch.bfloat16), rotary.phases(torch.tensor([0, 1])))
    assert turned.dtype == torch.bfloat16
    assert turned[0, 0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "expected"), [("silu", 2 / (1 + math.exp(-2))), ("gelu", 1.9544997), ("gelu_tanh", 1.9545977)]
)
def test_gated_mlp_activates_the_first_half_only(name: str, expected: float) -> None:
    gate_up = PackedLinear(torch.tensor([[2.0], [3.0]]))
    mlp = GatedMlp(gate_up, PackedLinear(torch.tensor([[1.0]])), name)
    with torch.inference_mode():
        assert mlp(torch.ones(1, 1)).item() == pytest.approx(3 * expected, abs=1e-5)
