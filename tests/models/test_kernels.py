"""The compiled kernels against torch: all formats, odd sizes, both instruction sets, rows that stand for themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from attention_config import attention_config
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.batch import BatchRow, build_forward_batch
from dspark.models import kernels
from dspark.models.attention import PagedAttention, reference_attention
from dspark.models.kernels import BLOCK_BYTES, BlockRows, KernelMatrix, WeightFormat, exact_format

pytestmark = pytest.mark.skipif(
    not kernels.instruction_set(), reason="no compiled kernels for this CPU or in this build"
)

BLOCKS = tuple(BLOCK_BYTES)


@pytest.fixture(params=["AVX2", "AVX-512"], autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    own = torch.ops.dspark.instruction_set()
    try:
        torch.ops.dspark.use_instruction_set(request.param)
    except RuntimeError:
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    torch.ops.dspark.use_instruction_set(own)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_blocks(weight_format: WeightFormat, num_rows: int, num_blocks: int, seed: int = 0) -> BlockRows:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, num_blocks, BLOCK_BYTES[weight_format])
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    num_halves = 2 if weight_format == WeightFormat.Q4_1 else 1
    halves = torch.randn((num_rows, num_blocks, num_halves), generator=generator).half()
    blocks[:, :, : 2 * num_halves] = halves.view(torch.uint8)
    return BlockRows(weight_format, blocks)


def a_matrix(weight_format: WeightFormat, num_outputs: int, num_inputs: int) -> tuple[KernelMatrix, Tensor]:
    """A matrix and the dense weights that it means."""
    if weight_format in BLOCKS:
        rows = random_blocks(weight_format, num_outputs, num_inputs // 32)
        return KernelMatrix(rows), rows.dense()
    weight = random(num_outputs, num_inputs, seed=1)
    if weight_format == WeightFormat.INT8:
        steps = weight.abs().amax(dim=1, keepdim=True) / 127.0
        return KernelMatrix(weight, weight_format), (weight / steps).round() * steps
    dtype = next(dtype for dtype, known in kernels.FLOAT_FORMATS.items() if known == weight_format)
    return KernelMatrix(weight, weight_format), weight.to(dtype).float()


@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 7, 12, 13, 40])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 32), (16, 64), (17, 96), (50, 160)])
def test_a_product_is_that_of_the_dense_weights(
    weight_format: WeightFormat, num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    matrix, dense = a_matrix(weight_format, num_outputs, num_inputs)
    x, bias, y = (
        random(num_rows, num_inputs, seed=2),
        random(num_outputs, seed=3),
        random(num_rows, num_outputs, seed=4),
    )
    expected = (x.double() @ dense.double().T + bias.double()).float()

    scale = float(expected.abs().max())
    torch.testing.assert_close(matrix.product(x, bias), expected, rtol=0, atol=3e-6 * scale)
    added = y.clone()
    matrix.add_product(added, x, bias)
    torch.testing.assert_close(added, y + expected, rtol=0, atol=3e-6 * scale)


@pytest.mark.parametrize("weight_format", [f for f in WeightFormat if f not in BLOCKS])
@pytest.mark.parametrize("num_inputs", [1, 3, 33])
def test_formats_without_blocks_take_any_number_of_inputs(weight_format: WeightFormat, num_inputs: int) -> None:
    matrix, dense = a_matrix(weight_format, 5, num_inputs)
    x = random(3, num_inputs, seed=2)

    torch.testing.assert_close(matrix.product(x), x @ dense.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_a_row_of_a_product_depends_on_that_row_alone(weight_format: WeightFormat) -> None:
    matrix, _ = a_matrix(weight_format, 50, 96)
    x = random(29, 96, seed=5)
    whole = matrix.product(x)

    for start, end in [(0, 1), (3, 10), (7, 20), (28, 29), (0, 29)]:
        assert torch.equal(matrix.product(x[start:end].contiguous()), whole[start:end])


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_instruction_sets_agree_to_the_bit(weight_format: WeightFormat, instruction_set: str) -> None:
    if instruction_set == "AVX2":
        pytest.skip("compared in the other run")
    matrix, _ = a_matrix(weight_format, 50, 96)
    x, qkv = random(13, 96, seed=6), random(4, 96, seed=7)
    own = [matrix.product(x), torch.ops.dspark.silu_mul(x), torch.ops.dspark.rms_norm(qkv, x[0].contiguous(), 1e-5)]
    torch.ops.dspark.use_instruction_set("AVX2")

    others = [matrix.product(x), torch.ops.dspark.silu_mul(x), torch.ops.dspark.rms_norm(qkv, x[0].contiguous(), 1e-5)]

    assert all(torch.equal(a, b) for a, b in zip(own, others, strict=True))


@pytest.mark.parametrize("weight_format", WeightFormat)
def test_rows_are_those_of_the_dense_weights(weight_format: WeightFormat) -> None:
    matrix, dense = a_matrix(weight_format, 35, 64)
    ids = torch.tensor([34, 0, 17, 17])

    torch.testing.assert_close(matrix.rows(ids), dense[ids], rtol=1e-6, atol=0)
    torch.testing.assert_close(matrix.dense(), dense, rtol=1e-6, atol=0)
    with pytest.raises(IndexError, match="row 35 of 35"):
        matrix.rows(torch.tensor([35]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(value: float) -> None:
    matrix, dense = a_matrix(WeightFormat.FLOAT16, 20, 64)
    x = random(4, 64, seed=8)
    x[2, 5] = value
    result = matrix.product(x)

    assert not result[2].isfinite().any()
    others = torch.tensor([0, 1, 3])
    torch.testing.assert_close(result[others], x[others] @ dense.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ([1.0, 0.5, -2.0], WeightFormat.FLOAT16),
        ([1.0, 2.0**-30, 2.0**100], WeightFormat.BFLOAT16),
        ([1.0, 1.0 + 2.0**-20], WeightFormat.FLOAT32),
    ],
)
def test_the_exact_format_is_the_smallest_that_loses_nothing(weight: list[float], expected: WeightFormat) -> None:
    assert exact_format(torch.tensor([weight])) == expected
    assert KernelMatrix(torch.tensor([weight])).format == expected


def test_blocks_mean_what_the_gguf_library_says() -> None:
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    for weight_format in BLOCKS:
        rows = random_blocks(weight_format, 3, 2)
        stored = rows.blocks.flatten(1).numpy()
        expected = quants.dequantize(stored, GGMLQuantizationType[weight_format.name])
        assert torch.equal(rows.dense(), torch.from_numpy(expected))


@given(st.integers(1, 70), st.integers(1, 5), st.integers(0, 99))
def test_norms_and_activations_are_torchs(width: int, num_rows: int, seed: int) -> None:
    x, weight = random(num_rows, 2 * width, seed=seed) * 8.0, random(2 * width, seed=seed + 1)
    gate, up = x.chunk(2, dim=1)

    torch.testing.assert_close(torch.ops.dspark.rms_norm(x, weight, 1e-5), F.rms_norm(x, (2 * width,), weight, 1e-5))
    torch.testing.assert_close(torch.ops.dspark.silu_mul(x), F.silu(gate) * up)


def test_the_activation_of_extreme_values_is_torchs() -> None:
    gate = torch.tensor([[-float("inf"), -1e30, -200.0, -88.5, -87.0, -0.0, 0.0, 88.0, 200.0, 1e30, float("inf")]])
    up = torch.ones_like(gate)

    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 88.0, 200.0, 1e30, float("inf")]])
    result = torch.ops.dspark.silu_mul(torch.cat([gate, up], dim=1))
    assert torch.isnan(result[0, 0])  # -inf * 0, as torch has it
    torch.testing.assert_close(result[:, 1:], expected[:, 1:], rtol=1e-6, atol=1e-34)
    assert torch.ops.dspark.silu_mul(torch.tensor([[float("nan"), 1.0]])).isnan().all()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_attention_is_that_of_the_reference(window: int | None, softcap: float | None, head_dim: int) -> None:
    config = attention_config(head_dim=head_dim, softcap=softcap)
    pool = random(9, 4, 2, 2, head_dim)
    pool[8] = float("nan")  # pages of others
    rows = [
        BatchRow(token_ids=[0], start_position=10, page_ids=[2, 0, 5]),
        BatchRow(token_ids=[0] * 7, start_position=0, page_ids=[1, 3]),
        BatchRow(token_ids=[0] * 3, start_position=6, page_ids=[4, 7, 6]),
    ]
    batch = build_forward_batch(rows, page_size=4)
    qkv = random(11, 10 * head_dim, seed=9)
    phases = torch.polar(torch.ones(11, 1, head_dim // 2), random(11, 1, head_dim // 2, seed=10))

    got = PagedAttention(config).plan(batch).rotate_and_attend(qkv, phases, pool, window=window)

    heads = qkv.unflatten(1, (10, head_dim))
    expected = reference_attention(
        heads[:, :6].contiguous(), pool, batch, window=window, scale=config.attention_scale, softcap=softcap
    )
    torch.testing.assert_close(got, expected.flatten(1), rtol=1e-4, atol=1e-5)
    slots = pool.flatten(0, 1)[batch.slot_mapping]
    assert torch.equal(slots[:, 0], heads[:, 6:8]) and torch.equal(slots[:, 1], heads[:, 8:])


def test_queries_and_keys_are_rotated_and_values_are_not() -> None:
    qkv, pool = random(2, 3 * 4), torch.zeros(1, 2, 2, 1, 4)
    phases = torch.polar(torch.ones(2, 1, 2), random(2, 1, 2, seed=3))
    before = qkv.clone().unflatten(1, (3, 4))
    torch.ops.dspark.rotate_and_store(qkv, torch.view_as_real(phases), pool, torch.tensor([1, 0]), 1)

    pairs = torch.view_as_complex(before[:, :2].unflatten(2, (2, 2)).contiguous())
    rotated = torch.view_as_real(pairs * phases).flatten(2)
    torch.testing.assert_close(qkv.unflatten(1, (3, 4))[:, :2], rotated)
    assert torch.equal(qkv.unflatten(1, (3, 4))[:, 2], before[:, 2])
    assert torch.equal(pool[0, [1, 0], 1, 0], before[:, 2])


def test_mistakes_are_errors_and_not_crashes() -> None:
    matrix, _ = a_matrix(WeightFormat.FLOAT32, 8, 32)
    with pytest.raises(RuntimeError, match="take 1024 bytes, not 2048"):
        matrix.product(random(2, 16))
    with pytest.raises(RuntimeError, match="contiguous float32"):
        matrix.product(random(2, 32).double())
    with pytest.raises(RuntimeError, match="block formats take inputs in 32s"):
        torch.ops.dspark.linear(random(1, 33), torch.zeros(10, dtype=torch.uint8), None, None, 6, 16)
    pool = torch.zeros(2, 4, 2, 1, 16)
    tables = (torch.tensor([5]), torch.tensor([0]), torch.tensor([0]))
    with pytest.raises(IndexError, match="page 5 of 2"):
        torch.ops.dspark.attention(random(1, 48), pool, *tables, 1, 0, 1.0, 0.0)
    with pytest.raises(IndexError, match="token 0 has no page"):
        torch.ops.dspark.attention(random(1, 48), pool, tables[0], tables[1], torch.tensor([4]), 1, 0, 1.0, 0.0)
    with pytest.raises(IndexError, match="slot 8 of 8"):
        torch.ops.dspark.rotate_and_store(random(1, 48), random(1, 16), pool, torch.tensor([8]), 1)
