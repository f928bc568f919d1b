"""Follows a request's text through its structure: what may come next on the drafted path, and where it is complete.

`llguidance` compiles structures and computes masks; this adds the drafted path, the text that may come before a
structure, and the ends. V vocabulary (rows of the target's logits), R rows of logits.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import tokenizers
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from torch import Tensor

from dspark.errors import RequestError, first_line
from dspark.request import SamplingParams
from dspark.structure import Structure

# Compiled structures that are kept. A structure is compiled where its request is checked, in the thread of whoever
# sends it; the engine's thread compiles it again only if so many others came in between.
MAX_COMPILED = 256
# At the most about 20 ms for building a lexer, 10 ms for a mask and 100 MB of lexer states.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000, step_lexer_fuel=150_000, max_lexer_states=50_000, verbose_errors=False
)
MAX_SHOWN_ERROR = 500  # characters


class HasBackend(Protocol):
    """What a structure needs of a tokenizer."""

    @property
    def backend(self) -> tokenizers.Tokenizer: ...


class StructureCompiler:
    """Compiles structures for one model. For callers from any thread; the first use takes a while."""

    def __init__(self, tokenizer: HasBackend, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._made: _Vocabulary | None = None
        self._making = threading.Lock()
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, structure: Structure) -> None:
        """Raise `RequestError` when a structure cannot be compiled or no text has it."""
        start = _Begun(self._vocabulary, self._beginning(structure), may_end=True)
        if start.is_complete or not start.allowed.any():
            message = start.error or "this model can write no text of it but perhaps the empty one"
            raise RequestError(
                f"structure leaves no token that could come out: {message}; correct it", param="structure"
            )

    def matcher_for(self, sampling: SamplingParams) -> StructureMatcher | None:
        """Return what follows one request from the beginning of its answer; None where it asks for no structure.

        With `ignore_eos` the answer goes on for as long as the structure allows. Raises `RequestError` when that
        cannot be compiled.
        """
        structure = sampling.structure
        if structure is None:
            return None
        begun = _Begun(self._vocabulary, self._beginning(structure), may_end=not sampling.ignore_eos)
        return StructureMatcher(begun if structure.after is None else _Awaited(_Marker(structure.after, begun), 0))

    @property
    def _vocabulary(self) -> _Vocabulary:
        with self._making:  # once, for it takes up to a second
            if self._made is None:
                backend = self._tokenizer.backend
                self._made = _Vocabulary(backend, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)
            return self._made

    def _beginning(self, structure: Structure) -> LLMatcher:
        """Return a matcher of one's own that has seen nothing."""
        key = (structure.kind, structure.text)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key].deep_copy()
        matcher = self._compile(structure)  # without the lock: others need not wait for it
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()

    def _compile(self, structure: Structure) -> LLMatcher:
        try:
            grammar = grammar_from(structure.kind, structure.text)
        except Exception as error:  # the conversion of GBNF raises whatever its parser may
            raise _not_compiled(structure, first_line(error)) from error
        matcher = LLMatcher(self._vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _not_compiled(structure, matcher.get_error())
        return matcher


def _not_compiled(structure: Structure, message: str) -> RequestError:
    return RequestError(
        f"structure cannot be compiled ({structure.kind}): {_shown(message)}; correct it", param="structure"
    )


def _shown(message: str) -> str:
    return message.removesuffix("<non-verbose/>").strip()[:MAX_SHOWN_ERROR]


class StructureMatcher:
    """Where the text of one request stands in its structure; for the engine's thread and those that compute."""

    def __init__(self, start: _Place) -> None:
        # By the drafted tokens that lead there from the committed text; None: no text of the structure goes there.
        self._places: dict[tuple[int, ...], _Place | None] = {(): start}
        # A drafter's call that was left behind may still ask for its path while the engine goes on.
        self._lock = threading.Lock()

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take in newly committed tokens."""
        with self._lock:
            place = self._place(tuple(token_ids))
            assert place is not None, f"the committed tokens {token_ids} leave the structure"
            self._places = {(): place}

    def allowed(self, drafted: Sequence[int] = ()) -> np.ndarray | None:
        """Return which tokens may follow the committed text and `drafted`, [V] bool.

        None where none is to follow: `drafted` completes the structure before its end, or holds what is forbidden.
        """
        with self._lock:
            place = self._place(tuple(drafted))
            return None if place is None or place.is_complete else place.allowed

    def mask_(self, logits: Tensor, drafted: Sequence[int]) -> None:
        """Write -inf over what may not come, in logits [R, V] of the last R positions of the path.

        The path is the committed text, then `drafted`; the last row follows all of it. Rows where nothing is to follow
        stay as they are, for nothing that is drawn from them comes out.
        """
        num_rows = logits.shape[0]
        is_forbidden = np.zeros(tuple(logits.shape), dtype=np.bool_)
        for row in range(num_rows):
            allowed = self.allowed(drafted[: len(drafted) + 1 - num_rows + row])
            if allowed is not None:
                np.logical_not(allowed, out=is_forbidden[row])
        logits.masked_fill_(torch.from_numpy(is_forbidden).to(logits.device), -torch.inf)

    def num_allowed(self, drafted: Sequence[int]) -> int:
        """Return how many leading tokens of a draft may come; none after the one that completes the structure."""
        path = tuple(drafted)
        with self._lock:
            length = 0
            while length < len(path) and self._place(path[: length + 1]) is not None:
                length += 1
            return length

    def is_complete(self, drafted: Sequence[int] = ()) -> bool:
        """Return whether nothing can follow the committed text and `drafted`, which together have the structure."""
        with self._lock:
            place = self._place(tuple(drafted))
            return place is not None and place.is_complete

    def _place(self, path: tuple[int, ...]) -> _Place | None:
        if path not in self._places:
            before = self._place(path[:-1])
            is_open = before is not None and not before.is_complete
            self._places[path] = before.after(path[-1]) if before is not None and is_open else None
        return self._places[path]


class _Place(Protocol):
    """A place in a text of the structure. It never changes."""

    @property
    def allowed(self) -> np.ndarray:
        """Which tokens may come next, [V] bool."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text has the structure and no token can follow, the end aside."""
        ...

    def after(self, token_id: int) -> _Place | None:
        """Return the place behind a token; None if it may not come."""
        ...


class _Begun(_Place):
    """A place in the structure itself. The matcher is its own."""

    def __init__(self, vocabulary: _Vocabulary, matcher: LLMatcher, *, may_end: bool) -> None:
        self.vocabulary = vocabulary
        self._matcher = matcher
        self._may_end = may_end and vocabulary.has_end

    @cached_property
    def allowed(self) -> np.ndarray:
        allowed = self.vocabulary.unpack(self._matcher.compute_bitmask())
        if self._matcher.is_error():  # no token leads on, or a limit was reached; the mask then says "the end"
            return np.zeros_like(allowed)
        if not self._may_end:
            allowed[self.vocabulary.end_ids] = False
        return allowed

    @property
    def error(self) -> str:
        """Which limit was reached here, as the library says it; empty for none."""
        message = _shown(self._matcher.get_error()) if self._matcher.is_error() else ""
        return "" if message == "NoExtensionBias" else message  # that is: no token leads on

    @cached_property
    def is_complete(self) -> bool:
        allowed = self.allowed
        if self._matcher.is_error() or not self._matcher.is_accepting():
            return False
        return np.count_nonzero(allowed) == np.count_nonzero(allowed[self.vocabulary.end_ids])

    def after(self, token_id: int) -> _Begun | None:
        if not self.allowed[token_id]:
            return None
        matcher = self._matcher.deep_copy()  # some microseconds; an error, after which nothing is allowed, stays in it
        matcher.consume_token(token_id)
        return _Begun(self.vocabulary, matcher, may_end=self._may_end)

    def after_text(self, text: bytes) -> _Begun | None:
        """Return the place behind a text, whatever its tokens; None if it may not come."""
        matcher = self._matcher.deep_copy()
        is_allowed = matcher.consume_tokens(self.vocabulary.tokenizer.tokenize_bytes(text))
        return _Begun(self.vocabulary, matcher, may_end=self._may_end) if is_allowed else None


class _Awaited(_Place):
    """A place before the structure, of whose marker the text ends with the first `num_seen` bytes."""

    is_complete = False

    def __init__(self, marker: _Marker, num_seen: int) -> None:
        self._marker = marker
        self._num_seen = num_seen

    @property
    def allowed(self) -> np.ndarray:
        return self._marker.allowed(self._num_seen)

    def after(self, token_id: int) -> _Place | None:
        if not self.allowed[token_id]:
            return None
        return self._marker.after(self._num_seen, token_id)


class _Marker:
    """A text behind which a structure begins."""

    def __init__(self, text: str, begin: _Begun) -> None:
        self._text = text.encode()
        self._begin = begin
        self._allowed: dict[int, np.ndarray] = {}

    def allowed(self, num_seen: int) -> np.ndarray:
        """Return what may follow its first bytes, [V] bool.

        Not the end of the answer, and no token that holds the marker's end and then what cannot begin the structure.
        """
        allowed = self._allowed.get(num_seen)
        if allowed is None:
            vocabulary = self._begin.vocabulary
            allowed = np.ones(vocabulary.vocab_size, dtype=np.bool_)
            allowed[vocabulary.end_ids] = False
            crossing_ids = vocabulary.ids_with_inner(self._text[-1:])
            allowed[[i for i in crossing_ids if self.after(num_seen, i) is None]] = False
            self._allowed[num_seen] = allowed
        return allowed

    def after(self, num_seen: int, token_id: int) -> _Place | None:
        """Return the place behind its first bytes and a token; None where it cannot begin the structure."""
        text = self._text[:num_seen] + self._begin.vocabulary.token_bytes[token_id]
        end = text.find(self._text)
        if end >= 0:
            return self._begun_with(text[end + len(self._text) :])
        lengths = range(min(len(text), len(self._text) - 1), 0, -1)
        return _Awaited(self, next((n for n in lengths if text.endswith(self._text[:n])), 0))

    def _begun_with(self, rest: bytes) -> _Begun | None:
        """Return the place behind `rest`, which came in one token with its end.

        White space there does not count unless the structure begins with it. None where it is not how one begins.
        """
        places = (self._begin.after_text(text) for text in (rest, rest.lstrip()))
        return next((place for place in places if place is not None), None)


class _Vocabulary:
    """A model's tokens as the library sees them. Raises `RequestError` for tokenizers that it does not know."""

    def __init__(self, backend: tokenizers.Tokenizer, *, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self._inner: dict[bytes, list[int]] = {}
        end_ids = sorted(eos_token_ids)
        try:
            if not end_ids:  # the library wants one: an id that no text has
                backend = tokenizers.Tokenizer.from_str(backend.to_str())
                backend.add_special_tokens(["<|end of the structure|>"])
                end_ids = [backend.get_vocab_size() - 1]
            size = max(vocab_size, backend.get_vocab_size())
            self.tokenizer = LLTokenizer(backend.to_str(), n_vocab=size, eos_token=end_ids)
        except Exception as error:
            raise RequestError(
                f"structured output is not supported with this model's tokenizer: {first_line(error)}; leave it out",
                param="structure",
            ) from error
        self.has_end = bool(eos_token_ids)
        self.end_ids = np.array([i for i in end_ids if i < vocab_size], dtype=np.int64)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """What each token writes, by id."""
        return [self.tokenizer.decode_bytes([token_id]) for token_id in range(self.vocab_size)]

    def ids_with_inner(self, byte: bytes) -> list[int]:
        """Return the tokens that hold a byte and something behind it."""
        if byte not in self._inner:
            self._inner[byte] = [i for i, token in enumerate(self.token_bytes) if byte in token[:-1]]
        return self._inner[byte]

    def unpack(self, bitmask: bytes) -> np.ndarray:
        """Return a mask as [V] bool."""
        bits = np.unpackbits(np.frombuffer(bitmask, dtype=np.uint8), count=self.vocab_size, bitorder="little")
        return bits.view(np.bool_)
