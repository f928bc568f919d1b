"""A request, its sampling parameters and what the engine answers; shared by every room, without torch."""

from __future__ import annotations

import math
import reprlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from numbers import Integral, Real

from dspark.errors import RequestError
from dspark.structure import Structure

# Below this temperature the logits would overflow when divided by it: it means greedy (case B9).
GREEDY_TEMPERATURE = 1e-5
MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LEN = 1024  # characters; the search tables grow with it
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_LISTED_TOKEN_IDS = 8192  # of allowed_token_ids and bad_token_ids
MAX_BAD_SEQUENCES = 512
BANNING_BIAS = -100.0  # a logit bias that means "never", whatever the logit
MAX_TOP_LOGPROBS = 20
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
    max_tokens: int | None = None  # None: up to the end of the context; 0 only with `prompt_logprobs`
    min_tokens: int = 0  # end-of-sequence and stop conditions wait for this many tokens
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    kept_token_ids: tuple[int, ...] = ()  # special tokens that show their text all the same
    # What changes the target's logits, in this order; see `speculation/logit_processing.py`.
    repetition_penalty: float = 1.0  # of tokens in prompt and output: logits above 0 divided, others multiplied by it
    frequency_penalty: float = 0.0  # taken off once for every time that a token was put out, in [-2, 2]
    presence_penalty: float = 0.0  # taken off every token that was put out, in [-2, 2]
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # added, in [-100, 100]; -100 bans
    bad_token_ids: tuple[int, ...] = ()  # never come out
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()  # never come out as a whole; the last token is what is banned
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else comes out; None is off
    structure: Structure | None = None  # the form that the text must have
    logprobs: int | None = None  # with every token its log-probability and so many of the likeliest; None: neither
    prompt_logprobs: int | None = None  # the same of the prompt's tokens but the first, with the first output
    num_draft_tokens: int | None = None  # drafted tokens a round at most, in place of the engine's; 0: plain decoding

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "kept_token_ids", tuple(self.kept_token_ids))
        object.__setattr__(self, "bad_token_ids", tuple(self.bad_token_ids))
        object.__setattr__(self, "bad_token_sequences", tuple(tuple(s) for s in self.bad_token_sequences))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        _check_number("temperature", self.temperature, low=0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p (0) must be in (0, 1]; use temperature 0 for greedy", param="top_p")
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_integer("top_k", self.top_k, low=-1)
        _check_integer("seed", self.seed, low=-MAX_SEED, high=MAX_SEED)
        _check_integer("logprobs", self.logprobs, low=0, high=MAX_TOP_LOGPROBS)
        _check_integer("prompt_logprobs", self.prompt_logprobs, low=0, high=MAX_TOP_LOGPROBS)
        _check_integer("max_tokens", self.max_tokens, low=1 if self.prompt_logprobs is None else 0)
        _check_integer("min_tokens", self.min_tokens, low=0)
        _check_integer("num_draft_tokens", self.num_draft_tokens, low=0, high=MAX_DRAFT_TOKENS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens}); lower min_tokens",
                param="min_tokens",
            )
        self._check_stops()
        self._check_logits()

    def _check_logits(self) -> None:
        _check_number("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        if self.structure is not None and not isinstance(self.structure, Structure):
            raise RequestError(
                f"structure ({reprlib.repr(self.structure)}) must be a Structure, as Structure.json_schema returns it",
                param="structure",
            )
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias ({reprlib.repr(self.logit_bias)}) must map token ids to numbers", param="logit_bias"
            )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty, so that nothing could come out; leave it out", param="allowed_token_ids"
            )
        for name, token_ids, limit in (
            ("logit_bias", self.logit_bias, MAX_LOGIT_BIASES),
            ("bad_token_ids", self.bad_token_ids, MAX_LISTED_TOKEN_IDS),
            ("allowed_token_ids", self.allowed_token_ids or (), MAX_LISTED_TOKEN_IDS),
        ):
            _check_count(name, len(token_ids), limit)
            _check_token_ids(name, token_ids)
        _check_count("bad_token_sequences", len(self.bad_token_sequences), MAX_BAD_SEQUENCES)
        for token_ids in self.bad_token_sequences:
            if not 1 <= len(token_ids) <= MAX_STOP_STRING_LEN:
                raise RequestError(
                    f"bad_token_sequences holds one of {len(token_ids)} tokens; 1 to {MAX_STOP_STRING_LEN} are allowed",
                    param="bad_token_sequences",
                )
            _check_token_ids("bad_token_sequences", token_ids)
        for bias in self.logit_bias.values():
            _check_number("logit_bias", bias, low=BANNING_BIAS, high=-BANNING_BIAS)

    def _check_stops(self) -> None:
        for name, values, limit in (
            ("stop", self.stop, MAX_STOP_STRINGS),
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
        ):
            _check_count(name, len(values), limit)
        for text in self.stop:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_STRING_LEN:
                raise RequestError(
                    f"stop ({reprlib.repr(text)}) must hold strings of 1 to {MAX_STOP_STRING_LEN} characters",
                    param="stop",
                )
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        _check_token_ids("kept_token_ids", self.kept_token_ids)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether what a token may still do depends on the text so far."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """The tokens that never come out: the bad ones and those with the banning bias."""
        biased = (i for i, bias in self.logit_bias.items() if bias == BANNING_BIAS)
        return frozenset(self.bad_token_ids).union(biased, *(s for s in self.bad_token_sequences if len(s) == 1))

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and its filters stands between the target's logits and the draw."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.bad_token_ids
            or self.bad_token_sequences
            or self.allowed_token_ids is not None
            or self.structure is not None
        )


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{name} has {count} entries, at most {limit} are allowed", param=name)


def _check_token_ids(name: str, token_ids: Iterable[int]) -> None:
    if all(type(token_id) is int and token_id >= 0 for token_id in token_ids):  # a long list, and each choice's again
        return
    for token_id in token_ids:
        _check_integer(name, token_id, low=0)


def _check_number(name: str, value: float, *, low: float, high: float = math.inf) -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        bound = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise RequestError(f"{name} ({reprlib.repr(value)}) must be a finite number, {bound}", param=name)


def _check_integer(name: str, value: int | None, *, low: int, high: int | None = None) -> None:
    if value is None and name in ("seed", "max_tokens", "num_draft_tokens", "logprobs", "prompt_logprobs"):
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


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """How likely the target found a token, before anything the request asks for was applied."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the likeliest tokens with theirs, in descending order
    rank: int | None = None  # 1 is the likeliest; counted for tokens of prompts alone


class OriginKind(StrEnum):
    """How a token came to be."""

    ACCEPTED = "accepted"  # drafted, and the target let it stand
    CORRECTED = "corrected"  # the target's own, in place of a drafted token that it rejected
    BONUS = "bonus"  # the target's own, after a draft that was accepted to its end
    PLAIN = "plain"  # the target's own, of a pass that verified no draft of this request


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOrigin:
    """How a token came to be, and whose draft was verified in that round."""

    kind: OriginKind
    proposer: str | None = None  # None for plain tokens


@dataclass(kw_only=True)
class RequestOutput:
    """What one engine step adds to one request. `text` may be empty while characters are held back."""

    request_id: str
    text: str = ""  # new text since the last output
    token_ids: list[int] = field(default_factory=list)  # new tokens since the last output
    token_origins: list[TokenOrigin] = field(default_factory=list)  # of these tokens
    logprobs: list[TokenLogprobs] | None = None  # of these tokens, where the request asks for them
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one per prompt token, None for the first; told once
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    error: str | None = None  # set with FinishReason.ERROR
    error_param: str | None = None  # the sampling parameter to blame, where it is the request's own fault
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache
    num_output_tokens: int = 0  # all tokens so far
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
