"""What a model can serve: limits of prompts and of what is asked for. No torch."""

from __future__ import annotations

from dspark.errors import RequestError
from dspark.request import Request


def check_request(request: Request, *, vocab_size: int, max_model_len: int, max_draft_tokens: int | None) -> None:
    """Raise `RequestError` naming the parameter that a model of this vocabulary and context cannot serve.

    `max_draft_tokens` is the drafter's trained length; None: it has none.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    if not len(prompt):
        raise RequestError("prompt is empty; give at least one token", param="prompt")
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, but the context holds {max_model_len} and at least one must be left "
            "for the answer; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    bad_id = next((i for i in prompt if not 0 <= i < vocab_size), None)
    if bad_id is not None:
        raise RequestError(
            f"prompt holds token id {bad_id}, but ids of this model are 0 to {vocab_size - 1}", param="prompt"
        )
    bad_id = next((i for i in sampling.stop_token_ids if i >= vocab_size), None)
    if bad_id is not None:
        raise RequestError(
            f"stop_token_ids holds {bad_id}, but ids of this model are 0 to {vocab_size - 1}", param="stop_token_ids"
        )
    length = sampling.num_draft_tokens
    if max_draft_tokens is not None and length is not None and length > max_draft_tokens:
        raise RequestError(
            f"num_draft_tokens ({length}) exceeds the drafter's trained length ({max_draft_tokens}); lower it",
            param="num_draft_tokens",
        )
    if sampling.min_tokens and len(set(sampling.stop_token_ids)) >= vocab_size:
        raise RequestError(
            f"stop_token_ids holds all {vocab_size} ids of this model, so that nothing could come out before "
            f"min_tokens ({sampling.min_tokens}); use fewer ids or no min_tokens",
            param="stop_token_ids",
        )
    if sampling.max_tokens is not None and len(prompt) + sampling.max_tokens > max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and max_tokens is {sampling.max_tokens}, together more than the "
            f"context of {max_model_len}; lower max_tokens, leave it out, or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )
