"""Token ids to text one token at a time, at a cost per token that does not grow with the text.

At any moment the text handed out so far plus `tail()` equals the tokenizer's decode of all ids, and what was
handed out never changes later: no half character, no byte run that a later byte could still spoil.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import tokenizers

REPLACEMENT = "\ufffd"

# A decoder with byte fallback turns a whole run of byte tokens into U+FFFD when the run is not valid UTF-8, so a
# run is settled only when it ends. Scripts that a vocabulary lacks make long runs: past this many bytes whole
# characters are handed out all the same, so that the stream neither stalls nor costs more per token.
MAX_HELD_BYTES = 64
MAX_UNFINISHED_BYTES = 3  # a character of UTF-8 has four at most

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HasBackend(Protocol):
    """What detokenising needs of a tokenizer."""

    @property
    def backend(self) -> tokenizers.Tokenizer: ...


class Detokenizer(Protocol):
    """Incremental decoding of one token stream."""

    def push(self, token_id: int) -> str:
        """Take one more token and return the text that is settled by it, perhaps none."""
        ...

    def tail(self) -> str:
        """Return the unsettled rest as it reads if no more tokens come."""
        ...


def create_detokenizer(
    tokenizer: HasBackend, *, skip_special_tokens: bool, kept_token_ids: Collection[int] = ()
) -> Detokenizer:
    """Return the detokenizer that suits the tokenizer's decoder; `kept_token_ids` show their text all the same."""
    table = _table_of(tokenizer)
    skipped_ids = table.special_ids.difference(kept_token_ids) if skip_special_tokens else frozenset()
    return (_ByteLevelDetokenizer if table.is_byte_level else _WindowDetokenizer)(table, skipped_ids)


def token_bytes(tokenizer: HasBackend, token_id: int) -> bytes:
    """Return the UTF-8 bytes that a token adds to a text it stands in; perhaps only parts of characters."""
    table = _table_of(tokenizer)
    return table.token_bytes(token_id) if table.is_byte_level else table.inner_bytes(token_id)


class _TokenTable:
    """Facts about the tokens of one tokenizer, worked out once for all requests."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        kinds = _decoder_kinds(backend)
        self.is_byte_level = kinds == {"ByteLevel"}
        self._has_byte_fallback = "ByteFallback" in kinds
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a byte-level token stands for; none for an id without a token."""
        token_bytes = self._bytes.get(token_id)
        if token_bytes is None:
            token = self.backend.id_to_token(token_id) or ""
            byte_of = _byte_of_character()
            # Added tokens may hold characters outside the byte alphabet; the decoder takes these literally.
            if all(character in byte_of for character in token):
                token_bytes = bytes(byte_of[character] for character in token)
            else:
                token_bytes = token.encode()
            self._bytes[token_id] = token_bytes
        return token_bytes

    def inner_bytes(self, token_id: int) -> bytes:
        """Return what any other token adds to a text that it does not begin; none for an id without a token."""
        token_bytes = self._bytes.get(token_id)
        if token_bytes is None:
            token_bytes = self.fallback_byte(token_id)
            if token_bytes is None and self.backend.id_to_token(token_id) is None:
                token_bytes = b""
            if token_bytes is None:
                # Behind a neighbour, itself, since decoders drop the space that begins a text.
                alone, twice = (self.backend.decode([token_id] * n, skip_special_tokens=False) for n in (1, 2))
                token_bytes = twice[len(alone) :].encode()
            self._bytes[token_id] = token_bytes
        return token_bytes

    def fallback_byte(self, token_id: int) -> bytes | None:
        """Return the byte of a byte-fallback token, None for any other token."""
        if not self._has_byte_fallback:
            return None
        match = _BYTE_TOKEN.fullmatch(self.backend.id_to_token(token_id) or "")
        return bytes.fromhex(match[1]) if match else None


_tables: WeakKeyDictionary[HasBackend, _TokenTable] = WeakKeyDictionary()


def _table_of(tokenizer: HasBackend) -> _TokenTable:
    table = _tables.get(tokenizer)
    if table is None:
        table = _tables[tokenizer] = _TokenTable(tokenizer.backend)
    return table


class _ByteLevelDetokenizer:
    """For byte-level vocabularies: tokens are bytes, and UTF-8 itself says when a character is whole."""

    def __init__(self, table: _TokenTable, skipped_ids: frozenset[int]) -> None:
        self._table = table
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped_ids:
            return ""
        return self._decoder.decode(self._table.token_bytes(token_id))

    def tail(self) -> str:
        pending, _ = self._decoder.getstate()
        return pending.decode(errors="replace")


class _WindowDetokenizer:
    """For any other decoder: decodes a window of the last settled token and all unsettled ones.

    The settled token gives the decoder its left neighbour, which decides about leading spaces.
    """

    def __init__(self, table: _TokenTable, skipped_ids: frozenset[int]) -> None:
        self._table = table
        self._skipped_ids = skipped_ids
        self._left_ids: list[int] = []  # the last settled token, or nothing yet
        self._left_text = ""
        self._ids: list[int] = []  # unsettled

    def push(self, token_id: int) -> str:
        if token_id in self._skipped_ids or self._table.backend.id_to_token(token_id) is None:
            return ""
        self._ids.append(token_id)
        is_byte = self._table.fallback_byte(token_id) is not None
        # Unknown decoders may join bytes of several tokens: there U+FFFD at the end may be half a character.
        if len(self._ids) < MAX_HELD_BYTES and (is_byte or self.tail().endswith(REPLACEMENT)):
            return ""
        return self._settle(len(self._ids) - self._num_unfinished())

    def tail(self) -> str:
        return self._decode(self._left_ids + self._ids)[len(self._left_text) :]

    def _settle(self, num_tokens: int) -> str:
        settled, self._ids = self._ids[:num_tokens], self._ids[num_tokens:]
        text = self._decode(self._left_ids + settled)[len(self._left_text) :]
        # A byte token is no left neighbour: decoded with the rest of its run it would read differently.
        left_id = next((i for i in reversed(settled) if self._table.fallback_byte(i) is None), None)
        if left_id is not None:
            self._left_ids = [left_id]
            self._left_text = self._decode(self._left_ids)
        return text

    def _num_unfinished(self) -> int:
        """Return how many of the last byte tokens begin a character without finishing it."""
        last_bytes = [self._table.fallback_byte(token_id) for token_id in self._ids[-MAX_UNFINISHED_BYTES:]]
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for byte in last_bytes:
            decoder.decode(b"\n" if byte is None else byte)  # a whole token finishes whatever was before it
        return len(decoder.getstate()[0])

    def _decode(self, token_ids: list[int]) -> str:
        # Special tokens to be skipped never enter the window.
        return self._table.backend.decode(token_ids, skip_special_tokens=False)


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    """Return the type names of the decoders in the tokenizer's decoder, sequences taken apart."""
    if backend.decoder is None:
        return set()
    kinds: set[str] = set()
    waiting: list[dict[str, Any]] = [json.loads(backend.decoder.__getstate__())]
    while waiting:
        state = waiting.pop()
        if state["type"] == "Sequence":
            waiting.extend(state["decoders"])
        else:
            kinds.add(state["type"])
    return kinds


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Return the alphabet of byte-level vocabularies: printable Latin-1 is itself, the rest sits at U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
