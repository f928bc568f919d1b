"""Log-probabilities of tokens of answers and prompts, from the target's logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.request import TokenLogprobs


def token_logprobs(
    logits: Tensor,  # [N, V] float32
    token_ids: Sequence[int],  # [N] the token that follows each row
    num_top: Sequence[int],  # [N] how many of the likeliest tokens to list
    *,
    counts_ranks: bool = False,
) -> list[TokenLogprobs]:
    """Return the log-probabilities of N tokens at temperature 1, and the likeliest tokens of their rows.

    Synchronises a few times.
    """
    assert logits.shape[0] == len(token_ids) == len(num_top), (logits.shape, len(token_ids), len(num_top))
    normalised = torch.log_softmax(logits, dim=-1)
    of_tokens = normalised.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])  # [N, 1]
    own: list[float] = of_tokens[:, 0].tolist()
    ranks: list[int | None] = [None] * len(own)
    if counts_ranks:
        ranks = ((normalised > of_tokens).sum(dim=-1) + 1).tolist()
    values, ids = normalised.topk(min(max(num_top), logits.shape[1]), dim=-1)  # [N, largest of num_top]
    tops = [
        tuple(zip(row_ids[:num], row_values[:num], strict=True))
        for row_ids, row_values, num in zip(ids.tolist(), values.tolist(), num_top, strict=True)
    ]
    return [
        TokenLogprobs(token_id=token_id, logprob=logprob, top=top, rank=rank)
        for token_id, logprob, top, rank in zip(token_ids, own, tops, ranks, strict=True)
    ]
