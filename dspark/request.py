"""A request, its sampling parameters and what the engine answers; shared by every room, without torch."""

from __future__ import annotations

import math
import reprlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from numbers import Integral, Real

from dspark.errors import RequestError

# Below this temperature the logits would overflow when divided by it: it means greedy (case B9).
GREEDY_TEMPERATURE = 1e-5
MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 1024  # characters; the search tables grow with it
MAX_STOP_TOKEN_IDS = 1024
MAX_DRAFT_TOKENS = 64  # no drafter is trained for more, and a round's cost grows with it


class FinishReason(StrEnum):
    """Why a request ended. OpenAI's names where it has them."""

    STOP = "stop"  # end-of-sequence token, stop token id or stop string
    LENGTH = "length"  # max_tokens or the context end
    ABORT = "abort"  # the client left, or the server shut down
    ERROR = "error"  # the engine could not go on with it


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks of decoding. Raises `RequestError` naming the first field out of range."""

    temperature: float = 1.0  # 0 (or below 1e-5) is greedy
    top_p: float = 1.0  # in (0, 1]; 1 is off
    top_k: int = 0  # 0 or -1 is off
    min_p: float = 0.0  # in [0, 1]; 0 is off
    seed: int | None = None  # set: the text is reproduced exactly whatever the load or the drafter
    max_tokens: int | None = None  # None: up to the end of the context
    min_tokens: int = 0  # end-of-sequence and stop conditions wait for this many tokens
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    num_draft_tokens: int | None = None  # drafted tokens a round at most, in place of the engine's; 0: plain decoding

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_number("temperature", self.temperature, low=0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p (0) must be in (0, 1]; use temperature 0 for greedy", param="top_p")
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_integer("top_k", self.top_k, low=-1)
        _check_integer("seed", self.seed, low=-MAX_SEED, high=MAX_SEED)
        _check_integer("max_tokens", self.max_tokens, low=1)
        _check_integer("min_tokens", self.min_tokens, low=0)
        _check_integer("num_draft_tokens", self.num_draft_tokens, low=0, high=MAX_DRAFT_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens}); lower min_tokens",
                param="min_tokens",
            )
        self._check_stops()

    def _check_stops(self) -> None:
        for name, values, limit in (
            ("stop", self.stop, MAX_STOP_STRINGS),
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ):
            if len(values) > limit:
                raise RequestError(f"{name} has {len(values)} entries, at most {limit} are allowed", param=name)
        for text in self.stop:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_STRING_LEN:
                raise RequestError(
                    f"stop ({reprlib.repr(text)}) must hold strings of 1 to {MAX_STOP_STRING_LEN} characters",
                    param="stop",
                )
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, low=0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


def _check_number(name: str, value: float, *, low: float, high: float = math.inf) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        bound = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise RequestError(f"{name} ({reprlib.repr(value)}) must be a finite number, {bound}", param=name)


def _check_integer(name: str, value: int | None, *, low: int, high: int | None = None) -> None:
    if value is None and name in ("seed", "max_tokens", "num_draft_tokens"):
        return
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):  # type: ignore[operator]
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} ({reprlib.repr(value)}) must be an integer, {bound}", param=name)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue. The engine checks it against the model and may refuse it with `RequestError`."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_time: float = field(default_factory=time.monotonic)  # seconds, monotonic clock


@dataclass(kw_only=True)
class SpeculationStats:
    """Counts of one request. A round is one decoding pass; the pass that ends the prefill is none."""

    num_rounds: int = 0
    num_drafted: int = 0  # proposed by the drafter
    num_verified: int = 0  # of these, checked by the target (the rest were trimmed)
    num_accepted: int = 0  # of these, accepted by the target
    num_emitted: int = 0  # tokens the client got from these rounds; an end inside a block cuts accepted ones
    accepted_counts: tuple[int, ...] = ()  # [j]: rounds that verified a draft and accepted j tokens of it
    max_draft_tokens: int = 0  # no round could draft more

    @property
    def accepted_length(self) -> float:
        """Mean tokens per round, bonus token included (tau in the paper); 0 before the first round."""
        return self.num_emitted / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted share of the verified tokens, bonus token excluded; 0 when none was verified."""
        return self.num_accepted / self.num_verified if self.num_verified else 0.0

    def count_round(self, *, num_verified: int, num_accepted: int, num_emitted: int) -> None:
        """Count one round; `num_verified` is 0 where it had no draft."""
        self.num_rounds += 1
        self.num_verified += num_verified
        self.num_accepted += num_accepted
        self.num_emitted += num_emitted
        if num_verified:
            counts = [*self.accepted_counts, *[0] * (num_accepted + 1 - len(self.accepted_counts))]
            counts[num_accepted] += 1
            self.accepted_counts = tuple(counts)  # a new one: copies of these counts stay as they are

    def plus(self, other: SpeculationStats) -> SpeculationStats:
        """Return the counts of both together."""
        pairs = zip_longest(self.accepted_counts, other.accepted_counts, fillvalue=0)
        return SpeculationStats(
            num_rounds=self.num_rounds + other.num_rounds,
            num_drafted=self.num_drafted + other.num_drafted,
            num_verified=self.num_verified + other.num_verified,
            num_accepted=self.num_accepted + other.num_accepted,
            num_emitted=self.num_emitted + other.num_emitted,
            accepted_counts=tuple(a + b for a, b in pairs),
            max_draft_tokens=max(self.max_draft_tokens, other.max_draft_tokens),
        )


@dataclass(kw_only=True)
class RequestOutput:
    """What one engine step adds to one request. `text` may be empty while characters are held back."""

    request_id: str
    text: str = ""  # new text since the last output
    token_ids: list[int] = field(default_factory=list)  # new tokens since the last output
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    error: str | None = None  # set with FinishReason.ERROR
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    num_output_tokens: int = 0  # all tokens so far
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
