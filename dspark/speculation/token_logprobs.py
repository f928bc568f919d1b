"""Log-probabilities of the tokens that came out, from the target's logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.request import TokenLogprobs


def token_logprobs(
    logits: Tensor,  # [N, V] float32
    token_ids: Sequence[int],  # [N] the token that came out at each row
    num_top: Sequence[int],  # [N] how many of the likeliest tokens to list
) -> list[TokenLogprobs]:
    """Return the log-probabilities of N tokens at temperature 1, and the likeliest tokens of their rows.

    Synchronises a few times.
    """
    assert logits.shape[0] == len(token_ids) == len(num_top), (logits.shape, len(token_ids), len(num_top))
    normalised = torch.log_softmax(logits, dim=-1)
    own: list[float] = normalised.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = normalised.topk(min(max(num_top), logits.shape[1]), dim=-1)  # [N, largest of num_top]
    tops = [
        tuple(zip(row_ids[:num], row_values[:num], strict=True))
        for row_ids, row_values, num in zip(ids.tolist(), values.tolist(), num_top, strict=True)
    ]
    return [
        TokenLogprobs(token_id=token_id, logprob=logprob, top=top)
        for token_id, logprob, top in zip(token_ids, own, tops, strict=True)
    ]
