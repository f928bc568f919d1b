"""Keys and values stand where the slot mapping says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dspark.models.kv_cache import KVCache, num_bytes_per_token
from dspark.models.model_config import decoder_config_from

CONFIG = decoder_config_from(Path(__file__).parents[1] / "fixtures" / "tiny_target")


def test_one_token_takes_the_keys_and_values_of_all_layers() -> None:
    """6 layers x 2 key heads x 16 dimensions x 2 (keys and values) x 4 bytes."""
    assert num_bytes_per_token(CONFIG, torch.float32) == 1536
    assert num_bytes_per_token(CONFIG, torch.bfloat16) == 768


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_is_taken_where_it_is_touched() -> None:
    before = resident_bytes()
    cache = KVCache(CONFIG, 20_000, 16, torch.float32, "cpu")  # 470 MB
    assert resident_bytes() - before < 50 * 2**20
    assert cache.pools[5][19_999].count_nonzero() == 0


def test_cleared_pages_are_zero_and_others_stay() -> None:
    cache = KVCache(CONFIG, 3, 4, torch.float32, "cpu")
    for pool in cache.pools:
        pool.fill_(float("nan"))
    cache.clear(torch.tensor([1]))
    assert all((pool[1] == 0).all() and pool[[0, 2]].isnan().all() for pool in cache.pools)


def test_written_tokens_stand_at_their_slots_of_their_layer() -> None:
    cache = KVCache(CONFIG, 3, 4, torch.float32, "cpu")
    keys, values = torch.full((2, 2, 16), 1.0), torch.full((2, 2, 16), 2.0)
    cache.write(4, keys, values, torch.tensor([9, 2]))
    pool = cache.pools[4]  # [pages, page_size, 2, KVH, Dh]
    assert (pool[2, 1, 0] == 1).all() and (pool[2, 1, 1] == 2).all()
    assert (pool[0, 2, 0] == 1).all() and (pool[0, 2, 1] == 2).all()
    assert pool.count_nonzero() == 2 * 2 * 2 * 16
    assert all(other.count_nonzero() == 0 for i, other in enumerate(cache.pools) if i != 4)
