"""Builds an engine from settings: resolves and loads the model, sizes the KV pool, makes the proposer."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dspark.config import DEFAULT_CONFIDENCE_THRESHOLD, EngineConfig, SpeculationConfig, resolved_max_size
from dspark.engine.capacity_cache import PEAK, MachineTimes, machine_times
from dspark.engine.compute_thread import ComputeThread
from dspark.engine.drafter_choice import DrafterChoice, choose_drafter
from dspark.engine.drafting import num_draft_tokens
from dspark.engine.engine import Engine
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.profile_rows import ProfileLimits
from dspark.engine.profiler import warm_up_passes
from dspark.engine.runner import Runner
from dspark.engine.saved_state import SavedState, state_key
from dspark.errors import CheckpointError, ConfigError, RequestError
from dspark.models.decoder import Decoder
from dspark.models.device import open_device
from dspark.models.drafter import Drafter, load_drafter
from dspark.models.drafter_calibration import CALIBRATION
from dspark.models.drafter_config import check_num_draft_tokens
from dspark.models.drafter_formats import is_drafter_folder
from dspark.models.kv_cache import num_bytes_per_token
from dspark.models.model_source import ModelFolder, resolve_model
from dspark.models.tokenizer import (
    GenerationDefaults,
    Tokenizer,
    compare_vocabularies,
    load_generation_defaults,
    load_tokenizer,
)
from dspark.models.weights import load_decoder
from dspark.request import SamplingParams
from dspark.speculation.capacity import MeasuredTimes, StepTimes
from dspark.speculation.combined import CombinedProposer
from dspark.speculation.draft_model import DraftModelProposer
from dspark.speculation.dspark_drafter import DSparkProposer
from dspark.speculation.ngram import NgramProposer
from dspark.speculation.planner import TIMED_SCHEDULERS, Planner
from dspark.speculation.proposal import Proposer

logger = logging.getLogger(__name__)

WrapProposer = Callable[[Proposer], Proposer]

DEFAULT_TOKENS_PER_REQUEST = 1024
DEFAULT_CACHE_BYTES = 2 * 2**30


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Weights and text side of one model folder; several engines may share it, and the thread that computes."""

    folder: ModelFolder
    decoder: Decoder
    tokenizer: Tokenizer
    generation_defaults: GenerationDefaults
    compute: ComputeThread


@dataclass(frozen=True, kw_only=True)
class ReadyEngine:
    """An engine that is as fast for its first request as for later ones, and where what it learns is kept."""

    engine: Engine
    saved_state: SavedState | None  # None: nothing is drafted, so nothing is learned


@dataclass(frozen=True, kw_only=True)
class _Built:
    engine: Engine
    limits: ProfileLimits
    times: MachineTimes | None
    choice: DrafterChoice
    drafter: LoadedModel | Drafter | None
    drafter_folder: Path | None


def load_engine(config: EngineConfig, *, wrap_proposer: WrapProposer | None = None) -> Engine:
    """Load everything `config` names and return an engine that is ready for requests.

    `wrap_proposer` is given the drafter and returns what drafts in its place. Raises `ConfigError` for settings that do
    not fit, `CheckpointError` for a model that cannot be used.
    """
    return build_engine(load_model(config.model, config), config, wrap_proposer=wrap_proposer)


def load_ready_engine(config: EngineConfig) -> ReadyEngine:
    """Load what `load_engine` does, run once what a first request would wait for, and restore what was learned.

    What an earlier run with the same weights learned of acceptance is read from the user's cache; the caller writes it
    there again. Says in the log what speculation will run.
    """
    model = load_model(config.model, config)
    built = model.compute.run(lambda: _build_engine(model, config, None, False))
    engine, saved_state, is_restored = built.engine, None, False
    _warm_up(built)
    if engine.drafting is not None:
        proposer_name = engine.drafting.proposer.name
        key = state_key(model, built.choice, config, proposer_name=proposer_name, drafter_folder=built.drafter_folder)
        saved_state = SavedState(key)
        is_restored = saved_state.restore(engine)
    logger.info("speculation: %s", _description(built, config.speculation, is_restored))
    return ReadyEngine(engine=engine, saved_state=saved_state)


def load_model(name: str, config: EngineConfig) -> LoadedModel:
    """Load the weights and tokenizer of `name` in the dtype and on the device of `config`."""
    compute = ComputeThread()
    return compute.run(lambda: _load_model(name, config, compute))


def _load_model(name: str, config: EngineConfig, compute: ComputeThread) -> LoadedModel:
    device = open_device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    folder = resolve_model(name)
    dtype = _torch_dtype(config.dtype, device)
    decoder = load_decoder(folder.path, dtype=dtype, device=device, weights=config.weights)
    return LoadedModel(
        folder=folder,
        decoder=decoder,
        tokenizer=load_tokenizer(folder.path),
        generation_defaults=load_generation_defaults(folder.path),
        compute=compute,
    )


def build_engine(
    model: LoadedModel,
    config: EngineConfig,
    *,
    wrap_proposer: WrapProposer | None = None,
    measure_anew: bool = False,
) -> Engine:
    """Return an engine over a loaded model, with a KV pool, a proposer and a planner of its own.

    The machine is measured first where the schedulers need that and the user's cache does not have it, or in any case.
    """
    return model.compute.run(lambda: _build_engine(model, config, wrap_proposer, measure_anew)).engine


def _build_engine(
    model: LoadedModel, config: EngineConfig, wrap_proposer: WrapProposer | None, measure_anew: bool
) -> _Built:
    _check_text_side(model)
    choice = choose_drafter(config.drafter, model.folder)
    drafter_folder = None if choice.source is None else resolve_model(choice.source).path
    drafter = None if drafter_folder is None else _load_drafter(model, choice, drafter_folder, config)
    page_size = config.cache.page_size
    max_model_len = _max_model_len(model.decoder, config)
    bytes_per_token = _bytes_per_token(model, drafter)
    num_pages = -(-_cache_tokens(bytes_per_token, max_model_len, config) // page_size)
    _check_memory(num_pages * page_size * bytes_per_token, config)
    if num_pages * page_size < max_model_len:
        logger.warning(
            "requests are limited to %d tokens instead of %d, for that is what the KV cache holds; raise it with "
            "--cache-tokens (cache.num_tokens) where memory allows",
            num_pages * page_size,
            max_model_len,
        )
    proposer = _make_proposer(model, choice, drafter, num_pages, config)
    tapped_layers = () if proposer is None else proposer.tapped_layers
    runner = Runner(model.decoder, num_pages=num_pages, page_size=page_size, tapped_layers=tapped_layers)
    max_model_len = min(max_model_len, num_pages * page_size)
    limits = ProfileLimits(
        max_batch_tokens=config.batching.max_batch_tokens,
        max_size=resolved_max_size(config.batching),
        max_model_len=max_model_len,
        num_pages=num_pages,
        page_size=page_size,
        num_draft_tokens=0 if proposer is None else num_draft_tokens(config.speculation, proposer),
    )
    found = _machine_times(model, choice, config, runner, proposer, limits, measure_anew)
    times = None if found is None else found.times
    planner = _make_planner(config.speculation, times, limits.num_draft_tokens)
    if proposer is not None and wrap_proposer is not None:
        proposer = wrap_proposer(proposer)
    engine = Engine(
        runner=runner,
        tokenizer=model.tokenizer,
        allocator=PageAllocator(num_pages, page_size, prefix_caching=config.cache.prefix_caching),
        vocab_size=model.decoder.config.vocab_size,
        max_model_len=max_model_len,
        config=config,
        generation_defaults=model.generation_defaults,
        proposer=proposer,
        planner=planner,
        compute=model.compute,
        model_name=model.folder.name,
        num_weight_bytes=model.decoder.num_weight_bytes,
    )
    peak = None if times is None else times.details.get(PEAK)
    if isinstance(peak, int | float):  # a capacity file of another engine does not know it
        engine.metrics.memory_bandwidth_peak.set(peak)
    return _Built(
        engine=engine, limits=limits, times=found, choice=choice, drafter=drafter, drafter_folder=drafter_folder
    )


def _warm_up(built: _Built) -> None:
    """Do once what the first request would otherwise wait for, and leave no trace of it."""
    engine = built.engine
    if built.times is None or not built.times.is_new:
        proposer = None if engine.drafting is None else engine.drafting.proposer
        engine.compute.run(lambda: warm_up_passes(engine.runner, proposer, limits=built.limits))
    if engine.tokenizer.has_chat_template:  # loads what renders it
        with contextlib.suppress(RequestError):  # a template may want more than one user turn
            engine.tokenizer.render_chat([{"role": "user", "content": ""}])


def _description(built: _Built, speculation: SpeculationConfig, is_restored: bool) -> str:
    """Return in a line who drafts, who decides how much of it is verified, and what that is decided from."""
    drafting = built.engine.drafting
    if drafting is None:
        return "none, plain decoding"
    parts = [f"{drafting.proposer.name} drafts up to {drafting.num_draft_tokens} tokens"]
    parts.append(f"scheduler {speculation.scheduler}")
    if built.times is not None:
        origin = "measured now" if built.times.is_new else f"from {built.times.path}"
        parts.append(f"times of this machine {origin}")
    if isinstance(built.drafter, Drafter) and built.drafter.config.has_confidence_head:
        parts.append(f"confidences {f'calibrated by {CALIBRATION}' if built.drafter.is_calibrated else 'as stated'}")
    parts.append(f"acceptance {'as an earlier run left it' if is_restored else 'not known yet'}")
    return ", ".join(parts)


def _check_text_side(model: LoadedModel) -> None:
    """Raise `CheckpointError` when the tokenizer or the end tokens do not fit the weights."""
    num_rows, folder = model.decoder.config.vocab_size, model.folder.path
    largest_id = max(model.tokenizer.vocabulary().values(), default=0)
    if largest_id >= num_rows:
        raise CheckpointError(
            f"the tokenizer in {folder} has token ids up to {largest_id}, but the embedding has {num_rows} rows; "
            "use the tokenizer files of this checkpoint"
        )
    bad_ids = sorted(i for i in model.generation_defaults.eos_token_ids if i >= num_rows)
    if bad_ids:
        raise CheckpointError(
            f"eos_token_id {bad_ids[0]} in {folder} is no row of the embedding ({num_rows} rows); correct "
            "generation_config.json or config.json"
        )
    try:
        SamplingParams(**model.generation_defaults.sampling_values())
    except RequestError as error:
        raise CheckpointError(f"generation_config.json in {folder}: {error}; correct it") from error


def _load_drafter(
    model: LoadedModel, choice: DrafterChoice, folder: Path, config: EngineConfig
) -> LoadedModel | Drafter:
    """Load the drafter or draft model in `folder` that was chosen, and check that it fits the target."""
    if is_drafter_folder(folder):
        num_ids = max(model.tokenizer.vocabulary().values(), default=-1) + 1
        layout = config.speculation.drafter_layout
        trained = load_drafter(folder, model.decoder, tokenizer_size=num_ids, layout=layout)
        if config.speculation.num_draft_tokens:
            check_num_draft_tokens(trained.config, config.speculation.num_draft_tokens)
        if not trained.config.has_confidence_head:
            logger.info("the drafter in %s has no confidence head: confidence scheduling is not available", folder)
        return trained
    assert choice.source is not None, choice
    drafter = _load_model(choice.source, config, model.compute)
    _check_text_side(drafter)
    compare_vocabularies(model.tokenizer, drafter.tokenizer)
    return drafter


def _make_proposer(
    model: LoadedModel,
    choice: DrafterChoice,
    drafter: LoadedModel | Drafter | None,
    num_pages: int,
    config: EngineConfig,
) -> Proposer | None:
    if drafter is None:
        return NgramProposer() if choice.has_ngram else None
    proposer = _drafter_proposer(model, drafter, num_pages, config)
    return CombinedProposer(proposer) if choice.has_ngram else proposer


def _drafter_proposer(
    model: LoadedModel, drafter: LoadedModel | Drafter, num_pages: int, config: EngineConfig
) -> Proposer:
    if isinstance(drafter, Drafter):
        return DSparkProposer(drafter, num_pages=num_pages, page_size=config.cache.page_size)
    runner = Runner(drafter.decoder, num_pages=num_pages, page_size=config.cache.page_size)
    return DraftModelProposer(
        runner.execute,
        vocab_size=model.decoder.config.vocab_size,
        draft_vocab_size=drafter.decoder.config.vocab_size,
        max_model_len=drafter.decoder.config.max_position,
        num_pages=num_pages,
        page_size=config.cache.page_size,
        max_batch_tokens=config.batching.max_batch_tokens,
    )


def _machine_times(
    model: LoadedModel,
    choice: DrafterChoice,
    config: EngineConfig,
    runner: Runner,
    proposer: Proposer | None,
    limits: ProfileLimits,
    anew: bool,
) -> MachineTimes | None:
    """Return the machine's times where a setting needs them."""
    if config.speculation.scheduler not in TIMED_SCHEDULERS and config.batching.target_tpot_ms is None:
        return None
    file = config.speculation.capacity_file
    return machine_times(
        model,
        choice,
        config,
        runner=runner,
        proposer=proposer,
        limits=limits,
        capacity_file=None if file is None else Path(file),
        anew=anew,
    )


def _make_planner(speculation: SpeculationConfig, times: MeasuredTimes | None, draft_length: int) -> Planner:
    threshold = speculation.confidence_threshold
    return Planner(
        scheduler=speculation.scheduler,
        times=None if times is None else StepTimes(times),
        confidence_threshold=DEFAULT_CONFIDENCE_THRESHOLD if threshold is None else threshold,
        num_draft_tokens=draft_length,
    )


def _max_model_len(decoder: Decoder, config: EngineConfig) -> int:
    limit = decoder.config.max_position
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len ({config.max_model_len}) exceeds what the model was made for ({limit}); lower it"
        )
    return config.max_model_len


def _bytes_per_token(model: LoadedModel, drafter: LoadedModel | Drafter | None) -> int:
    """Return what one token takes in all pools together."""
    num_bytes = num_bytes_per_token(model.decoder.config, model.decoder.dtype)
    if drafter is not None:
        network = drafter if isinstance(drafter, Drafter) else drafter.decoder
        num_bytes += num_bytes_per_token(network.config, network.dtype)
    return num_bytes


def _cache_tokens(bytes_per_token: int, max_model_len: int, config: EngineConfig) -> int:
    """Return the KV capacity in tokens: as configured, or what the default number of bytes holds in all pools."""
    if config.cache.num_tokens is not None:
        return config.cache.num_tokens
    wanted = max(max_model_len, resolved_max_size(config.batching) * DEFAULT_TOKENS_PER_REQUEST)
    return min(wanted, DEFAULT_CACHE_BYTES // bytes_per_token)


def _check_memory(cache_bytes: int, config: EngineConfig) -> None:
    """Raise `ConfigError` for a KV cache that this machine can never hold; elsewhere the device's allocator tells."""
    if torch.device(config.device).type != "cpu":
        return
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if cache_bytes > memory_bytes:
        raise ConfigError(
            f"the KV cache of {config.cache.num_tokens or config.cache.page_size} tokens takes "
            f"{cache_bytes / 2**30:.1f} GiB, but this machine has {memory_bytes / 2**30:.1f} GiB; lower --cache-tokens "
            "(cache.num_tokens) or --page-size (cache.page_size)"
        )


def _torch_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype
