"""Memory traffic: the bytes a target pass has to read, and how fast this machine reads at best.

At small batches a pass reads all weights for a few tokens, so that their ratio says how near to the limit it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dspark.models.decoder import Decoder
from dspark.models.kv_cache import num_bytes_per_token

PEAK_BUFFER_BYTES = 2**28  # more than any cache holds
PEAK_REPEATS = 5
PEAK_LIMIT_S = 0.5  # of repeats, on a slow machine


def context_bytes(decoder: Decoder, num_context_tokens: int) -> int:
    """Return the bytes of keys and values that a pass reads for so many tokens of context, those of all rows."""
    return num_context_tokens * num_bytes_per_token(decoder.config, decoder.dtype)


def measure_peak_bytes_per_s(
    device: torch.device,
    *,
    num_bytes: int = PEAK_BUFFER_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return how fast the memory of `device` is read at best: the fastest of a few sums over a large buffer."""
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    best_s = float("inf")
    start = clock()
    for _ in range(PEAK_REPEATS):
        begin = clock()
        buffer.sum().item()  # waits for the device
        now = clock()
        best_s = min(best_s, now - begin)
        if now - start > PEAK_LIMIT_S:
            break
    return buffer.numel() * 4 / best_s
