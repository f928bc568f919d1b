"""The flags of every verb that runs an engine, and the settings they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from dspark.config import (
    DEFAULT_CONFIDENCE_THRESHOLD,
    DEFAULT_NUM_DRAFT_TOKENS,
    DRAFTER_LAYOUTS,
    DTYPES,
    FALLBACK_STRATEGIES,
    REASONING_FORMATS,
    SCHEDULERS,
    TOOL_CALL_FORMATS,
    VERIFICATIONS,
    WEIGHTS,
    EngineConfig,
    engine_config_from,
    load_engine_config,
)

# flag -> where its value goes in the nested settings
ENGINE_FLAGS: dict[str, tuple[str, ...]] = {
    "model": ("model",),
    "drafter": ("drafter",),
    "dtype": ("dtype",),
    "weights": ("weights",),
    "device": ("device",),
    "threads": ("num_threads",),
    "max_model_len": ("max_model_len",),
    "num_draft_tokens": ("speculation", "num_draft_tokens"),
    "drafter_layout": ("speculation", "drafter_layout"),
    "verification": ("speculation", "verification"),
    "scheduler": ("speculation", "scheduler"),
    "confidence_threshold": ("speculation", "confidence_threshold"),
    "fallback_strategy": ("speculation", "fallback_strategy"),
    "capacity_file": ("speculation", "capacity_file"),
    "min_batch_size": ("batching", "min_size"),
    "max_batch_size": ("batching", "max_size"),
    "max_wait_time": ("batching", "max_wait_time"),
    "target_tpot_ms": ("batching", "target_tpot_ms"),
    "max_batch_tokens": ("batching", "max_batch_tokens"),
    "page_size": ("cache", "page_size"),
    "cache_tokens": ("cache", "num_tokens"),
    "prefix_caching": ("cache", "prefix_caching"),
    "tool_call_format": ("chat", "tool_call_format"),
    "reasoning_format": ("chat", "reasoning_format"),
}


def add_engine_flags(parser: argparse.ArgumentParser, *, with_drafter: bool = True) -> None:
    """Add the flags to a verb's parser."""
    group = parser.add_argument_group("engine (flags win over --config)")
    defaults = EngineConfig()

    def add(flag: str, value: Any, text: str, **more: Any) -> None:
        # The default stays out of the namespace, so that a flag not given does not hide the file's setting.
        group.add_argument(flag, default=argparse.SUPPRESS, help=f"{text} (default: {value})", **more)

    group.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="settings in YAML")
    _add_model_flags(add, defaults, with_drafter=with_drafter)
    add("--device", defaults.device, "torch device")
    add("--threads", "torch's choice", "CPU threads", type=int)
    add("--max-model-len", "the model's", "prompt and output tokens at most", type=int)
    add(
        "--num-draft-tokens", f"the drafter's trained length, or {DEFAULT_NUM_DRAFT_TOKENS}",
        "drafted tokens a round at most", type=int,
    )  # fmt: skip
    add(
        "--drafter-layout", defaults.speculation.drafter_layout, "how the files of a DSpark drafter are read",
        choices=DRAFTER_LAYOUTS,
    )  # fmt: skip
    add("--verification", defaults.speculation.verification, "rule for unseeded requests", choices=VERIFICATIONS)
    add(
        "--scheduler",
        defaults.speculation.scheduler,
        "chooses how many drafted tokens are verified",
        choices=SCHEDULERS,
    )
    add(
        "--confidence-threshold",
        DEFAULT_CONFIDENCE_THRESHOLD,
        "of --scheduler threshold: least chance that a token survives",
        type=float,
    )
    add(
        "--fallback-strategy", defaults.speculation.fallback_strategy, "auto decodes plainly where drafting fails",
        choices=FALLBACK_STRATEGIES,
    )  # fmt: skip
    add("--capacity-file", "measured", "SPS file with the machine's speed, in place of measuring it")
    add("--min-batch-size", defaults.batching.min_size, "requests that should start together", type=int)
    add("--max-wait-time", defaults.batching.max_wait_time, "longest wait for --min-batch-size: 10ms, 1s or seconds")
    add("--max-batch-size", "as many as fit", "running requests at most", type=int)
    add("--target-tpot-ms", "none", "admit requests while each gets a token in so many milliseconds", type=float)
    add("--max-batch-tokens", defaults.batching.max_batch_tokens, "tokens of one pass at most", type=int)
    add("--page-size", defaults.cache.page_size, "tokens per KV page", type=int)
    add("--cache-tokens", "1024 for each of --max-batch-size or 64, at most 2 GiB", "KV capacity in tokens", type=int)
    group.add_argument(
        "--no-prefix-caching", dest="prefix_caching", action="store_false", default=argparse.SUPPRESS,
        help="compute every prompt from its start",
    )  # fmt: skip


def _add_model_flags(add: Callable[..., None], defaults: EngineConfig, *, with_drafter: bool) -> None:
    add("--model", defaults.model, "smollm2-135m, a folder, a GGUF file or a hub id")
    if with_drafter:
        add(
            "--drafter", defaults.drafter,
            "auto (the drafter that ships for the model together with n-gram, else ngram), none, ngram, dspark (the "
            "shipped one alone), a DSpark drafter or a smaller model (folder, GGUF or hub id); +ngram after the last "
            "two adds n-gram, as in dspark+ngram",
        )  # fmt: skip
    add("--dtype", defaults.dtype, "type of activations and KV; auto is float32 on CPU", choices=DTYPES)
    add(
        "--weights", defaults.weights,
        "how matrices are held in float32 on CPU; auto: as the checkpoint has them; gguf: blocks of a GGUF file",
        choices=WEIGHTS,
    )  # fmt: skip


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of verbs that serve chats."""
    for flag, choices, text in (
        ("--tool-call-format", TOOL_CALL_FORMATS, "how the model writes tool calls; none refuses tools"),
        ("--reasoning-format", REASONING_FORMATS, "how the model marks its reasoning; none leaves it in the content"),
    ):
        parser.add_argument(
            flag, choices=choices, default=argparse.SUPPRESS, help=f"{text} (default: auto, by the chat template)"
        )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the settings of --config with the given flags laid over them."""
    settings: dict[str, Any] = {}
    for flag, path in ENGINE_FLAGS.items():
        if hasattr(args, flag):
            place = settings
            for key in path[:-1]:
                place = place.setdefault(key, {})
            place[path[-1]] = getattr(args, flag)
    if hasattr(args, "config"):
        return load_engine_config(args.config, settings)
    return engine_config_from(settings)
