"""Log-probabilities in the two shapes of the OpenAI API, built token by token for whole answers and chunks alike."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from dspark.engine.detokenizer import HasBackend, token_bytes
from dspark.request import TokenLogprobs

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot write


class LogprobsWriter:
    """Writes the log-probabilities of one choice; texts of tokens are worked out once."""

    def __init__(self, tokenizer: HasBackend, *, is_chat: bool, text_offset: int = 0) -> None:
        """`text_offset`: characters that come before the first token."""
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._text_offset = text_offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of a choice for these tokens, the ones after those of the last call."""
        return self._chat_fields(entries) if self._is_chat else self._completion_fields(entries)

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

    def _completion_fields(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tops = []
        for entry in entries:
            top: dict[str, float] = {}
            # The token that came out is always among them, so that there may be one more than asked for.
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                top.setdefault(self._name(token_id), _finite(logprob))
            tops.append(top)
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": tops,
            "text_offset": [self._next_offset(entry.token_id) for entry in entries],
        }

    def _name(self, token_id: int) -> str:
        """Return a token's text, or its bytes spelled out where these are only parts of characters."""
        data = token_bytes(self._tokenizer, token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _next_offset(self, token_id: int) -> int:
        offset = self._text_offset
        self._text_offset += len(self._decoder.decode(token_bytes(self._tokenizer, token_id)))
        return offset


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
