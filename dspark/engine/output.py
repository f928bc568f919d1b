"""What one request puts out: where a block of accepted tokens ends, and which text may leave already.

Blocks are taken token by token, so that the result is that of plain decoding however the tokens were cut into
blocks. Token ids, counts and text always end at the same token. No torch here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dspark.engine.detokenizer import REPLACEMENT, HasBackend, create_detokenizer
from dspark.request import FinishReason, SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class AppendResult:
    """What an accepted block adds to a request. Tokens after the first `num_kept` are to be dropped."""

    num_kept: int
    text: str = ""  # may leave now; more may be held back
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # a stop token id or stop string; None for end-of-sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class _StopMatch:
    end: int  # offset in characters of the request's text
    stop: str


class OutputProcessor:
    """Follows the output of one request.

    The end is the first token at which one of these holds, in this order: it is an end-of-sequence token; it is a
    stop token; it completes a stop string; it completes the structure that the text must have; it is the last one
    allowed. Before `min_tokens` tokens exist only the last two apply. An end-of-sequence or stop token counts as a
    token but shows no text, and a stop string is cut from the text, unless `include_stop_str_in_output`. Of several
    stop strings the one that is complete first wins.
    """

    def __init__(
        self,
        tokenizer: HasBackend,
        sampling: SamplingParams,
        *,
        eos_token_ids: Collection[int],
        max_output_tokens: int,  # the smaller of max_tokens and what the context leaves
    ) -> None:
        assert max_output_tokens >= 0, max_output_tokens
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._max_tokens = max_output_tokens
        self._min_tokens = sampling.min_tokens
        self._includes_stop = sampling.include_stop_str_in_output
        self._eos_token_ids = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._detokenizer = create_detokenizer(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            kept_token_ids=sampling.kept_token_ids,
        )
        self._stops = _StopStrings(sampling.stop) if sampling.stop else None
        self._held = ""  # settled text that may turn out to begin a stop string
        self._num_settled = 0  # characters searched for stop strings, the held ones included
        self._stop_text_start = 0  # a stop string counts only when it ends after this offset (min_tokens)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end the request; none of them may come out before `min_tokens`."""
        return self._eos_token_ids | self._stop_token_ids

    @property
    def num_tokens_left(self) -> int:
        """How many more tokens the request may get."""
        return self._max_tokens - self.num_tokens

    def append(self, token_ids: Sequence[int], *, completes_structure: bool = False) -> AppendResult:
        """Take a block of accepted tokens and return what it adds, up to where the request ends.

        `completes_structure` says so of the last one.
        """
        assert self.finish_reason is None, (self.finish_reason, token_ids)
        text: list[str] = []
        for index, token_id in enumerate(token_ids):
            is_end = completes_structure and index == len(token_ids) - 1
            stop_reason = self._take(token_id, text, completes_structure=is_end)
            if self.finish_reason is not None:
                return AppendResult(
                    num_kept=index + 1,
                    text="".join(text),
                    finish_reason=self.finish_reason,
                    stop_reason=stop_reason,
                )
        return AppendResult(num_kept=len(token_ids), text="".join(text))

    def flush(self) -> str:
        """Return the text held back so far, for a request that is ended from outside."""
        text = self._held + self._detokenizer.tail()
        self._held = ""
        return text

    def _take(self, token_id: int, text: list[str], *, completes_structure: bool) -> int | str | None:
        """Process one token: extend `text`, set `finish_reason` at the end, return the stop reason."""
        self.num_tokens += 1
        if self.num_tokens >= self._min_tokens and (
            token_id in self._eos_token_ids or token_id in self._stop_token_ids
        ):
            self.finish_reason = FinishReason.STOP
            if self._includes_stop:
                text.append(self._held + self._detokenizer.push(token_id))
                self._held = ""
            text.append(self.flush())
            return None if token_id in self._eos_token_ids else token_id

        settled = self._detokenizer.push(token_id)
        if self._stops is None:
            text.append(settled)
        else:
            match = self._search_stops(settled)
            if match is not None:
                self.finish_reason = FinishReason.STOP
                text.append(self._text_up_to(match))
                return match.stop
            text.append(self._release())
        if completes_structure or self.num_tokens >= self._max_tokens:
            self.finish_reason = FinishReason.STOP if completes_structure else FinishReason.LENGTH
            text.append(self.flush())
        return None

    def _search_stops(self, settled: str) -> _StopMatch | None:
        """Hold `settled` back and search it, and the unsettled text after it, for stop strings."""
        assert self._stops is not None
        self._held += settled
        self._num_settled += len(settled)
        tail = self._detokenizer.tail()
        if tail.endswith(REPLACEMENT):  # half a character: not known yet
            tail = ""
        if self.num_tokens < self._min_tokens:
            self._stop_text_start = self._num_settled + len(tail)
        match = self._stops.feed(settled, after=self._stop_text_start)
        if match is None and tail:
            match = self._stops.peek(tail, after=self._stop_text_start)
        return match

    def _text_up_to(self, match: _StopMatch) -> str:
        assert self._stops is not None
        num_held = len(self._held)
        text = self._held + self._detokenizer.tail()
        self._held = ""
        cut = match.end if self._includes_stop else match.end - len(match.stop)
        return text[: cut - (self._num_settled - num_held)]

    def _release(self) -> str:
        """Return the held text but for the part that may begin a stop string."""
        assert self._stops is not None
        num_released = len(self._held) - self._stops.num_pending
        released, self._held = self._held[:num_released], self._held[num_released:]
        return released


class _StopStrings:
    """Searches a growing text for stop strings, character by character (Knuth, Morris, Pratt 1977).

    One state per string, the length of its longest prefix that the text ends with, both finds the first string
    to be complete and says how much of the text must not leave yet; the cost per character is constant.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.num_fed = 0  # characters
        self._stops = stops
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._first_characters = {stop[0] for stop in stops}

    @property
    def num_pending(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max(self._states)

    def feed(self, text: str, *, after: int) -> _StopMatch | None:
        """Search `text`, the continuation of what was fed, for the first string that ends after offset `after`."""
        if not any(self._states) and self._first_characters.isdisjoint(text):
            self.num_fed += len(text)
            return None
        for character in text:
            self.num_fed += 1
            completed = self._advance(character)
            if completed and self.num_fed > after:
                # Strings completed by the same character: the longest, so that none of its beginning is shown.
                return _StopMatch(end=self.num_fed, stop=max(completed, key=len))
        return None

    def peek(self, text: str, *, after: int) -> _StopMatch | None:
        """Search like `feed`, but forget `text` again."""
        states, num_fed = self._states.copy(), self.num_fed
        match = self.feed(text, after=after)
        self._states, self.num_fed = states, num_fed
        return match

    def _advance(self, character: str) -> list[str]:
        completed = []
        for index, (stop, fallbacks) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            state = self._states[index]
            while state and stop[state] != character:
                state = fallbacks[state]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                completed.append(stop)
                state = fallbacks[state]
            self._states[index] = state
        return completed


def _fallbacks(stop: str) -> list[int]:
    """Return, for each prefix length of `stop`, the length of the prefix's longest proper border."""
    borders = [0, 0]
    for character in stop[1:]:
        border = borders[-1]
        while border and stop[border] != character:
            border = borders[border]
        borders.append(border + 1 if stop[border] == character else 0)
    return borders
