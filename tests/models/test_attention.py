"""The fast path equals the plain reference on ragged shapes, and groups rows as its cost model says."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from attention_config import attention_config
from torch import Tensor

from dspark.batch import BatchRow, ForwardBatch, build_forward_batch
from dspark.models.attention import PagedAttention, reference_attention
from dspark.models.attention_buckets import partition_rows
from dspark.models.model_config import DecoderConfig

PAGE_SIZE = 4
NUM_PAGES = 256


def batch_of(lens: list[tuple[int, int]], *, shuffle_seed: int | None = 0) -> ForwardBatch:
    """Rows of (query_len, context_len) over disjoint pages, shuffled unless the seed is None."""
    free = list(range(NUM_PAGES))
    if shuffle_seed is not None:
        random.Random(shuffle_seed).shuffle(free)
    rows = []
    for query_len, context_len in lens:
        num_pages = -(-context_len // PAGE_SIZE)
        pages, free = free[:num_pages], free[num_pages:]
        rows.append(BatchRow(token_ids=[0] * query_len, start_position=context_len - query_len, page_ids=pages))
    return build_forward_batch(rows, page_size=PAGE_SIZE)


def tensors_for(config: DecoderConfig, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(batch.num_tokens, config.num_heads, config.head_dim, generator=generator)
    pool = torch.randn(NUM_PAGES, PAGE_SIZE, 2, config.num_kv_heads, config.head_dim, generator=generator)
    return queries, pool


def assert_equals_reference(config: DecoderConfig, batch: ForwardBatch) -> None:
    queries, pool = tensors_for(config, batch)
    window = config.window(0)
    expected = reference_attention(
        queries, pool, batch, window=window, scale=config.attention_scale, softcap=config.attention_softcap
    )
    got = PagedAttention(config).plan(batch).attend(queries, pool, window=window)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


SHAPES = {
    "one decode": [(1, 13)],
    "one decode in a full page": [(1, 16)],
    "one prefill": [(19, 19)],
    "one long chunk with a prefix": [(70, 131)],
    "verification": [(6, 37)],
    "equal decodes": [(1, 21)] * 5,
    "decodes of all lengths": [(1, n) for n in (1, 4, 5, 63, 8, 120)],
    "ragged verification": [(1, 30), (3, 9), (7, 7), (2, 66), (16, 40), (1, 1)],
    "prefill beside decodes": [(1, 50), (33, 60), (1, 7), (17, 17), (4, 90)],
    "one long beside many short": [(1, 400)] + [(2, 9)] * 9,
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 1, 6, 64])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_fast_path_equals_the_reference(shape: str, window: int | None, softcap: float | None) -> None:
    assert_equals_reference(attention_config(window=window, softcap=softcap), batch_of(SHAPES[shape]))


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (5, 1), (9, 3)])
def test_any_grouping_of_heads_equals_the_reference(heads: tuple[int, int]) -> None:
    config = attention_config(num_heads=heads[0], num_kv_heads=heads[1], softcap=None)
    assert_equals_reference(config, batch_of([(1, 30), (5, 12), (40, 44), (1, 31)]))


@pytest.mark.parametrize("seed", range(30))
def test_random_ragged_batches_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    lens = []
    for _ in range(rng.randint(1, 8)):
        query_len = rng.choice([1, 1, 1, 2, 5, 8, 20])
        lens.append((query_len, query_len + rng.randint(0, 70)))
    config = attention_config(window=rng.choice([None, 3, 17]), softcap=rng.choice([None, 5.0]))
    assert_equals_reference(config, batch_of(lens, shuffle_seed=rng.choice([None, seed])))


def test_one_batch_serves_layers_with_and_without_a_window() -> None:
    config = attention_config(window=5, softcap=None)
    batch = batch_of([(3, 20), (1, 44)])
    queries, pool = tensors_for(config, batch)
    plan = PagedAttention(config).plan(batch)
    for window in (None, 5, None, 5):
        expected = reference_attention(queries, pool, batch, window=window, scale=0.3, softcap=None)
        torch.testing.assert_close(plan.attend(queries, pool, window=window), expected, atol=2e-6, rtol=1e-5)


def test_reference_gives_a_hand_computed_value() -> None:
    """One head of one dimension, keys 0 and 1, values 10 and 20, query ln 3: weights 1/4 and 3/4."""
    pool = torch.zeros(1, 2, 2, 1, 1)
    pool[0, :, 0, 0, 0] = torch.tensor([0.0, 1.0])
    pool[0, :, 1, 0, 0] = torch.tensor([10.0, 20.0])
    batch = build_forward_batch([BatchRow(token_ids=[0], start_position=1, page_ids=[0])], page_size=2)
    query = torch.tensor([[[3.0]]]).log()
    output = reference_attention(query, pool, batch, window=None, scale=1.0, softcap=None)
    assert output.item() == pytest.approx(17.5)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_pages_of_other_requests_are_never_read(window: int | None, softcap: float | None) -> None:
    """NaN in every foreign page would reach the output even with weight 0."""
    config = attention_config(window=window, softcap=softcap)
    batch = batch_of([(1, 8), (5, 60), (1, 24), (2, 40)])
    queries, pool = tensors_for(config, batch)
    foreign = sorted(set(range(NUM_PAGES)) - set(np.concatenate(batch.page_tables).tolist()))
    pool[foreign] = torch.nan
    assert PagedAttention(config).plan(batch).attend(queries, pool, window=window).isfinite().all()


def test_a_row_beside_a_broken_request_stays_whole() -> None:
    config = attention_config(softcap=None)
    batch = batch_of([(1, 8), (1, 60)])
    queries, pool = tensors_for(config, batch)
    pool[batch.page_tables[1]] = torch.nan
    assert PagedAttention(config).plan(batch).attend(queries, pool, window=None)[0].isfinite().all()


def test_pages_before_the_window_are_not_read() -> None:
    config = attention_config(window=6, softcap=None)
    batch = batch_of([(2, 60), (1, 41)])
    queries, pool = tensors_for(config, batch)
    for pages, context_len in zip(batch.page_tables, batch.context_lens, strict=True):
        pool[pages[: (context_len - 8) // PAGE_SIZE]] = torch.nan
    assert PagedAttention(config).plan(batch).attend(queries, pool, window=6).isfinite().all()


def test_plan_works_under_no_grad_after_inference_mode() -> None:
    config = attention_config(softcap=None)
    batch = batch_of([(1, 8), (1, 9)])
    queries, pool = tensors_for(config, batch)
    attention = PagedAttention(config)
    with torch.inference_mode():
        first = attention.plan(batch).attend(queries, pool, window=None)
    with torch.no_grad():
        second = attention.plan(batch).attend(queries, pool, window=None)
    assert torch.equal(first, second)


def test_varlen_kernel_is_not_tried_on_cpu() -> None:
    config = attention_config(softcap=None)
    assert not PagedAttention(config).uses_varlen(torch.zeros(4, PAGE_SIZE, 2, 2, 8))


def groups_of(query_lens: list[int], key_lens: list[int], *, overhead: float, limit: float = 1e9) -> list[list[int]]:
    return sorted(partition_rows(query_lens, key_lens, overhead_tokens=overhead, max_tokens=limit))


def test_equal_rows_share_one_bucket() -> None:
    assert groups_of([1, 1, 1], [64, 64, 64], overhead=100) == [[0, 1, 2]]


def test_one_long_context_does_not_pad_the_short_ones() -> None:
    assert groups_of([1, 1, 1, 1], [100, 2000, 100, 100], overhead=200) == [[0, 2, 3], [1]]


def test_small_differences_are_not_worth_a_bucket() -> None:
    assert groups_of([1, 1, 1], [96, 112, 128], overhead=200) == [[0, 1, 2]]


def test_a_prefill_chunk_stands_alone() -> None:
    assert groups_of([1, 300, 1], [256, 300, 256], overhead=200) == [[0, 2], [1]]


def test_bucket_size_is_limited() -> None:
    assert groups_of([1] * 4, [100] * 4, overhead=200, limit=200) == [[0, 1], [2, 3]]


def test_a_row_over_the_limit_still_gets_a_bucket() -> None:
    assert groups_of([1, 1], [500, 500], overhead=200, limit=200) == [[0], [1]]


def test_long_queries_are_kept_from_widening_many_single_ones() -> None:
    assert groups_of([1, 8, 1, 1, 1], [256] * 5, overhead=200) == [[0, 2, 3, 4], [1]]
