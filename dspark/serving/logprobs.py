"""Log-probabilities in the two shapes of the OpenAI API, built token by token for whole answers and chunks alike.

Those of prompts come in front of a completion's, where it echoes its prompt, and apart in vLLM's shape.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dspark.engine.detokenizer import HasBackend, token_bytes
from dspark.request import TokenLogprobs

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot write


class HasSpecialTokens(HasBackend, Protocol):
    """A tokenizer that knows which of its tokens texts leave out."""

    @property
    def special_token_ids(self) -> Collection[int]: ...


class LogprobsWriter:
    """Writes the log-probabilities of one choice."""

    def __init__(
        self, tokenizer: HasSpecialTokens, *, is_chat: bool, echo: str = "", skips_special_tokens: bool = True
    ) -> None:
        """`echo`: the text that comes before the first token of the answer."""
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._echo = echo
        self._hidden_ids = tokenizer.special_token_ids if skips_special_tokens else ()
        self._text_offset = len(echo)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of a choice for these tokens, the ones after those of the last call."""
        if self._is_chat:
            return self._chat_fields(entries)
        offsets = []
        for entry in entries:
            offsets.append(self._text_offset)
            if entry.token_id not in self._hidden_ids:
                self._text_offset += len(self._decoder.decode(token_bytes(self._tokenizer, entry.token_id)))
        return self._completion_fields([e.token_id for e in entries], entries, offsets)

    def write_echo(
        self, prompt_token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], num_top: int
    ) -> dict[str, Any]:
        """Return what comes before the first `write` of a completion that echoes its prompt."""
        special_ids = self._tokenizer.special_token_ids
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        offsets, offset = [], 0
        for token_id in prompt_token_ids:
            offsets.append(min(offset, len(self._echo)))
            text = decoder.decode(token_bytes(self._tokenizer, token_id))
            # Of special tokens the text has those that the client wrote out, not those that the tokenizer adds.
            if token_id not in special_ids or self._echo.startswith(text, offset):
                offset += len(text)
        shown = [None if e is None else replace(e, top=e.top[:num_top]) for e in entries]
        return self._completion_fields(prompt_token_ids, shown, offsets)

    def _chat_fields(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [
            {
                **self._chat_token(entry.token_id, entry.logprob),
                "top_logprobs": [self._chat_token(token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = token_bytes(self._tokenizer, token_id)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}

    def _completion_fields(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offsets: Sequence[int]
    ) -> dict[str, Any]:
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": list(offsets),
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        # The token that came out is always among them, so that there may be one more than asked for.
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._name(token_id), _finite(logprob))
        return top

    def _name(self, token_id: int) -> str:
        """Return a token's text, or its bytes spelled out where these are only parts of characters."""
        data = token_bytes(self._tokenizer, token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs_fields(
    tokenizer: HasBackend, entries: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` in vLLM's shape: by token id, the likeliest first, the prompt's own token among them."""
    return [None if entry is None else _prompt_token_fields(tokenizer, entry, num_top) for entry in entries]


def _prompt_token_fields(tokenizer: HasBackend, entry: TokenLogprobs, num_top: int) -> dict[str, Any]:
    assert entry.rank is not None, entry
    listed = {i: (logprob, rank) for rank, (i, logprob) in enumerate(entry.top[:num_top], start=1)}
    listed.setdefault(entry.token_id, (entry.logprob, entry.rank))
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": token_bytes(tokenizer, token_id).decode(errors="replace"),
        }
        for token_id, (logprob, rank) in listed.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
