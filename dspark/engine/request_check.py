"""What a model can serve: limits of prompts and of what is asked for. No torch."""

from __future__ import annotations

from collections.abc import Collection

from dspark.errors import RequestError
from dspark.request import Request


def check_request(
    request: Request,
    *,
    vocab_size: int,
    max_model_len: int,
    eos_token_ids: Collection[int],
    max_draft_tokens: int | None,
) -> None:
    """Raise `RequestError` naming the parameter that a model of this vocabulary and context cannot serve.

    `max_draft_tokens` is the drafter's trained length; None: it has none.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not len(prompt):
        raise RequestError("prompt is empty; give at least one token", param="prompt")
    if len(prompt) + (sampling.max_tokens != 0) > max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, but the context holds {max_model_len} and at least one must be left "
            "for the answer, if any is wanted; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    bad_id = next((i for i in prompt if not 0 <= i < vocab_size), None)
    if bad_id is not None:
        raise RequestError(
            f"prompt holds token id {bad_id}, but ids of this model are 0 to {vocab_size - 1}", param="prompt"
        )
    _check_token_ids(request, vocab_size)
    _check_something_can_come_out(request, vocab_size, eos_token_ids)
    length = sampling.num_draft_tokens
    if max_draft_tokens is not None and length is not None and length > max_draft_tokens:
        raise RequestError(
            f"num_draft_tokens ({length}) exceeds the drafter's trained length ({max_draft_tokens}); lower it",
            param="num_draft_tokens",
        )
    if sampling.max_tokens is not None and len(prompt) + sampling.max_tokens > max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}, together more than the "
            f"context of {max_model_len}; lower max_tokens, leave it out, or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )


def _check_token_ids(request: Request, vocab_size: int) -> None:
    sampling = request.sampling
    for name, token_ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
        ("bad_token_ids", sampling.bad_token_ids),
        ("bad_token_sequences", [i for sequence in sampling.bad_token_sequences for i in sequence]),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
    ):
        bad_id = next((i for i in token_ids if i >= vocab_size), None)
        if bad_id is not None:
            raise RequestError(f"{name} holds {bad_id}, but ids of this model are 0 to {vocab_size - 1}", param=name)


def _check_something_can_come_out(request: Request, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """Raise `RequestError` where bans leave no token at all, or none that may come before min_tokens."""
    sampling = request.sampling
    # The last token of a bad sequence counts as banned: there are texts after which it is.
    banned = sampling.banned_token_ids.union(token_ids[-1] for token_ids in sampling.bad_token_sequences)
    allowed = sampling.allowed_token_ids
    param = "bad_token_ids" if allowed is None else "allowed_token_ids"
    possible = None if allowed is None else set(allowed) - banned
    if len(banned) >= vocab_size if possible is None else not possible:
        raise RequestError(f"{param} leaves no token that could come out; allow at least one", param=param)
    if not sampling.min_tokens:
        return
    ends = set(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids)
    if len(banned | ends) >= vocab_size if possible is None else possible <= ends:
        param = "stop_token_ids" if allowed is None else "allowed_token_ids"
        raise RequestError(
            f"{param} leaves no token that could come out before min_tokens ({sampling.min_tokens}), for the tokens "
            "that end the answer may not; allow another one or use no min_tokens",
            param=param,
        )
