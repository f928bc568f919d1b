"""Settings: frozen dataclasses with one place for each default, read from YAML; unknown keys are errors."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from dspark.errors import ConfigError
from dspark.request import MAX_DRAFT_TOKENS

DEFAULT_MODEL = "smollm2-135m"
DTYPES = ("auto", "float32", "bfloat16", "float16")
WEIGHTS = ("auto", "float32", "float16", "bfloat16", "int8", "gguf")
DRAFTER_LAYOUTS = ("auto", "deepspec", "speculators")
DEFAULT_NUM_DRAFT_TOKENS = 5
MAX_THREADS = 1024
MAX_WAIT_TIME_S = 60.0
AUTO_MAX_SIZE = 64  # running requests that an automatic batching.max_size makes room for
SCHEDULERS = ("auto", "early_stop", "delayed", "threshold", "fixed")
FALLBACK_STRATEGIES = ("auto", "off")
DEFAULT_CONFIDENCE_THRESHOLD = 0.3
VERIFICATIONS = ("rejection", "block", "coupled")
TOOL_CALL_FORMATS = ("auto", "none", "hermes", "llama3_json", "mistral", "mistral_args")
REASONING_FORMATS = ("auto", "none", "think")


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How drafts are made and checked."""

    # At most this many drafted tokens a round (gamma in the paper); 0: plain decoding; None: what the drafter was
    # trained for, `DEFAULT_NUM_DRAFT_TOKENS` for drafters of any length.
    num_draft_tokens: int | None = None
    drafter_layout: str = "auto"  # how the files of a trained drafter are read; auto: as they say of themselves
    verification: str = "rejection"  # for unseeded requests; a request that names a seed gets "coupled"
    # How many drafted tokens a step verifies. auto, early_stop, delayed: by confidences and the machine's speed; auto
    # also decides whether to draft at all. threshold: those likely to survive. fixed: all.
    scheduler: str = "auto"
    confidence_threshold: float | None = None  # of scheduler threshold; None: `DEFAULT_CONFIDENCE_THRESHOLD`
    fallback_strategy: str = "auto"  # auto: what fails in drafting costs drafts; off: it is the step's error
    capacity_file: str | None = None  # SPS file with the machine's speed; None: measured at start and kept

    def __post_init__(self) -> None:
        _require_one_of("speculation.scheduler", self.scheduler, SCHEDULERS)
        _require_one_of("speculation.fallback_strategy", self.fallback_strategy, FALLBACK_STRATEGIES)
        threshold = self.confidence_threshold
        if threshold is not None and not 0.0 <= threshold <= 1.0:
            raise ConfigError(f"speculation.confidence_threshold ({threshold}) must be from 0 to 1; change it")
        if threshold is not None and self.scheduler != "threshold":
            raise ConfigError(
                f"speculation.confidence_threshold ({threshold}) has no effect with scheduler {self.scheduler!r}; "
                "choose scheduler threshold or leave it out"
            )
        if self.num_draft_tokens is not None:
            _require_at_least("speculation.num_draft_tokens", self.num_draft_tokens, 0)
            if self.num_draft_tokens > MAX_DRAFT_TOKENS:
                raise ConfigError(
                    f"speculation.num_draft_tokens ({self.num_draft_tokens}) must be at most {MAX_DRAFT_TOKENS}"
                )
        _require_one_of("speculation.drafter_layout", self.drafter_layout, DRAFTER_LAYOUTS)
        _require_one_of("speculation.verification", self.verification, VERIFICATIONS)


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """How many requests share a step."""

    min_size: int = 1  # requests that should start together; those who run never wait for it
    max_size: int | None = None  # running requests at most; None: as many as KV cache and token budget hold
    max_wait_time: float | str = "10ms"  # a request waits so long at most for min_size; "10ms", "1s", or seconds
    max_batch_tokens: int = 256  # tokens of one target pass at most; longer prompts are prefilled in chunks
    # Requests are admitted while the predicted milliseconds per token of each stay below it, the rest queue; None: all.
    target_tpot_ms: float | None = None

    def __post_init__(self) -> None:
        _require_at_least("batching.min_size", self.min_size, 1)
        _require_at_least("batching.max_batch_tokens", self.max_batch_tokens, 16)
        if self.max_size is not None:
            _require_at_least("batching.max_size", self.max_size, 1)
            if self.max_batch_tokens < self.max_size:
                raise ConfigError(
                    f"batching.max_batch_tokens ({self.max_batch_tokens}) is below batching.max_size "
                    f"({self.max_size}): each running request needs one token a step; raise it or lower max_size"
                )
        name = "max_batch_tokens" if self.max_size is None else "max_size"
        limit = self.max_batch_tokens if self.max_size is None else self.max_size
        if self.min_size > limit:
            raise ConfigError(
                f"batching.min_size ({self.min_size}) exceeds batching.{name} ({limit}), so that no batch could ever "
                f"have it; lower min_size or raise {name}"
            )
        if self.target_tpot_ms is not None and not 0.0 < self.target_tpot_ms < math.inf:
            raise ConfigError(
                f"batching.target_tpot_ms ({self.target_tpot_ms}) must be a finite number of milliseconds above 0; "
                "leave it out for no target"
            )
        _seconds_of("batching.max_wait_time", self.max_wait_time)  # raises

    @property
    def max_wait_s(self) -> float:
        """`max_wait_time` in seconds."""
        return _seconds_of("batching.max_wait_time", self.max_wait_time)

    @property
    def target_tpot_s(self) -> float | None:
        """`target_tpot_ms` in seconds."""
        return None if self.target_tpot_ms is None else self.target_tpot_ms / 1000.0


def resolved_max_size(batching: BatchingConfig) -> int:
    """Return how many running requests to size pools and measurements for; of an automatic max_size more may run."""
    if batching.max_size is not None:
        return batching.max_size
    return max(batching.min_size, min(AUTO_MAX_SIZE, batching.max_batch_tokens))


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    page_size: int = 16  # tokens per page
    # Capacity in tokens; None: 1024 for each of max_size requests (64 if that is automatic), at most 2 GiB in all.
    num_tokens: int | None = None
    prefix_caching: bool = True  # reuse the KV of prompts that begin alike

    def __post_init__(self) -> None:
        _require_at_least("cache.page_size", self.page_size, 1)
        if self.num_tokens is not None:
            _require_at_least("cache.num_tokens", self.num_tokens, self.page_size)


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How answers of chats are read; auto: as the model's chat template says."""

    tool_call_format: str = "auto"  # none: tools are refused
    reasoning_format: str = "auto"  # think: <think>...</think> at an answer's beginning; none: it is content

    def __post_init__(self) -> None:
        _require_one_of("chat.tool_call_format", self.tool_call_format, TOOL_CALL_FORMATS)
        _require_one_of("chat.reasoning_format", self.reasoning_format, REASONING_FORMATS)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine needs to start."""

    model: str = DEFAULT_MODEL  # "smollm2-135m", a local folder, a GGUF file or a hub id
    # "none", "ngram", "dspark" (the drafter that ships for the model), a DSpark drafter of the model or a smaller model
    # of the same vocabulary, the last three also with "+ngram"; "auto": what ships and n-gram, or n-gram alone.
    drafter: str = "auto"
    dtype: str = "auto"  # "auto" is float32 on CPU, bfloat16 elsewhere
    # How the compiled kernels hold matrices; "auto": exactly as the checkpoint has them, in the smallest form. Others
    # round, or ("gguf") are the blocks of a GGUF file.
    weights: str = "auto"
    device: str = "cpu"  # a torch device
    num_threads: int | None = None  # CPU threads of the forward pass; None: torch's choice
    max_model_len: int | None = None  # prompt plus output; None: what the model allows
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    batching: BatchingConfig = field(default_factory=BatchingConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)

    def __post_init__(self) -> None:
        _require_one_of("dtype", self.dtype, DTYPES)
        _require_one_of("weights", self.weights, WEIGHTS)
        if self.num_threads is not None:
            _require_at_least("num_threads", self.num_threads, 1)
            if self.num_threads > MAX_THREADS:
                raise ConfigError(f"num_threads ({self.num_threads}) must be at most {MAX_THREADS}; lower it")
        if self.max_model_len is not None:
            _require_at_least("max_model_len", self.max_model_len, 2)


def load_engine_config(path: Path | str, overrides: Mapping[str, Any] | None = None) -> EngineConfig:
    """Read a YAML file and lay `overrides` (nested like the file) over it. Raises `ConfigError`."""
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not {type(settings).__name__}")
    return engine_config_from(_merged(settings, overrides or {}))


def engine_config_from(settings: Mapping[str, Any]) -> EngineConfig:
    """Build the configuration from nested mappings. Raises `ConfigError` naming an unknown key and the nearest one."""
    return _build(EngineConfig, settings, prefix="")


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        inner = merged.get(key)
        if isinstance(value, Mapping):
            merged[key] = _merged(inner if isinstance(inner, Mapping) else {}, value)
        else:
            merged[key] = value
    return merged


def _build(cls: Any, settings: Mapping[str, Any], *, prefix: str) -> Any:
    types = get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in names:
            near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.4)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(names)}"
            raise ConfigError(f"unknown setting {prefix}{key}; {hint}")
        if is_dataclass(types[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{prefix}{key} ({value!r}) must be a mapping of settings")
            value = _build(types[key], value, prefix=f"{prefix}{key}.")
        else:
            _require_type(f"{prefix}{key}", value, types[key])
        values[key] = value
    return cls(**values)


def _require_type(name: str, value: Any, expected: Any) -> None:
    allowed = getattr(expected, "__args__", (expected,))
    accepted = (*allowed, int) if float in allowed else allowed
    if (isinstance(value, bool) and bool not in allowed) or not isinstance(value, accepted):
        wanted = " or ".join("null" if t is type(None) else t.__name__ for t in allowed)
        raise ConfigError(f"{name} ({value!r}) must be {wanted}, not {type(value).__name__}")


def _require_at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} ({value}) must be at least {low}; raise it")


def _seconds_of(name: str, value: float | str) -> float:
    """Read a time in seconds: a number, or a text with a number and perhaps the unit ms or s."""
    text, unit_s = str(value).strip(), 1.0
    if text.endswith("ms"):
        text, unit_s = text.removesuffix("ms"), 1e-3
    elif text.endswith("s"):
        text = text.removesuffix("s")
    try:
        seconds = float(text) * unit_s
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds <= MAX_WAIT_TIME_S:
        raise ConfigError(
            f"{name} ({value!r}) must be a time from 0 to {MAX_WAIT_TIME_S:g} seconds, such as 10ms, 1s or 0.01"
        )
    return seconds


def _require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} ({value!r}) must be one of {', '.join(choices)}")
