"""Offline benchmark: the same prompts through several drafters and concurrencies, interleaved in one run.

Plain decoding is always measured beside the drafters, so that every figure has its baseline in the same run.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import dspark
from dspark.batch import BatchRow
from dspark.config import BatchingConfig, EngineConfig, resolved_max_size
from dspark.engine.build import LoadedModel, build_engine, load_model
from dspark.engine.capacity_cache import cpu_name
from dspark.engine.engine import Engine
from dspark.engine.runner import Runner
from dspark.errors import ConfigError
from dspark.evaluation.bench_report import Pair, summary
from dspark.evaluation.bench_variant import PLAIN, Variant
from dspark.evaluation.closed_loop import PassResult, closed_loop_pass
from dspark.evaluation.prompts import PromptRecord
from dspark.evaluation.transformers_baseline import TransformersBaseline
from dspark.request import SamplingParams

TRANSFORMERS = "transformers"  # `transformers.generate`, one stream at a time, as a baseline
CEILING_CONTEXT_LEN = 64  # tokens of context in the forward pass timed as ceiling


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure."""

    drafters: tuple[str, ...] = ("none", "auto")  # names of variants, see `Variant.parse`
    concurrency: tuple[int, ...] = (1, 4, 16)
    # A pass answers so many prompts: one number for all concurrencies (where one is higher, as many as that), or one
    # for each; None: all there are.
    num_prompts: tuple[int, ...] | None = None
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 3
    seed: int | None = None  # request i gets seed + i; with it sampled text can be compared with the plain run's
    compare_transformers: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The concurrencies to run; the transformers baseline needs plain decoding at 1 beside it."""
        return tuple(dict.fromkeys((*self.concurrency, *((1,) if self.compare_transformers else ()))))

    def prompts_at(self, concurrency: int, num_prompts: int) -> int:
        """Return how many of so many prompts a pass at a concurrency answers."""
        if self.num_prompts is None:
            return num_prompts
        wanted = self.num_prompts[0]
        if len(self.num_prompts) > 1 and concurrency in self.concurrency:
            wanted = self.num_prompts[self.concurrency.index(concurrency)]
        return max(wanted, concurrency)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What to compare, plain decoding among it."""
        return tuple(Variant.parse(name) for name in dict.fromkeys((PLAIN, *self.drafters)))

    def __post_init__(self) -> None:
        for name in ("max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} ({getattr(self, name)}) must be at least 1")
        if not self.drafters or not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError(
                f"drafters ({self.drafters}) and concurrency ({self.concurrency}) need at least one entry, "
                "and every concurrency must be at least 1"
            )
        numbers = self.num_prompts
        if numbers is not None and (len(numbers) not in (1, len(self.concurrency)) or min(numbers) < 1):
            raise ConfigError(
                f"num_prompts ({numbers}) must be one number, or one for each concurrency ({self.concurrency}), and at "
                "least 1"
            )
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigError(f"temperatures ({self.temperatures}) must be one or more different numbers")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises `RequestError` naming it
        for name in self.drafters:
            Variant.parse(name)  # raises `ConfigError`


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Where variants are compared with each other."""

    concurrency: int
    temperature: float


Passes = dict[str, Callable[[int], PassResult]]  # by name of the variant; over so many prompts
WARM_UP_SHARE = 4  # of the prompts, one in so many is answered before anything counts


def run_bench(
    engine_config: EngineConfig,
    bench: BenchConfig,
    prompts: Sequence[PromptRecord],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure and return `{"kind", "machine", "settings", "ceiling", "runs"}`; `progress` gets a line per pass."""
    num_prompts = {size: max(size, bench.prompts_at(size, len(prompts))) for size in bench.sizes}
    for size, wanted in num_prompts.items():
        if wanted > len(prompts):
            raise ConfigError(
                f"{wanted} prompts at a concurrency of {size} are more than there are ({len(prompts)}); lower "
                "--num-prompts or --concurrency, or give more prompts"
            )
    model, config, engines = load_variants(engine_config, bench.variants, max(bench.concurrency))
    prompt_ids = [prompt.token_ids(model.tokenizer) for prompt in prompts]
    cells = {
        cell: _passes(engines, bench, cell, prompt_ids)
        for cell in (Cell(concurrency=c, temperature=t) for c in bench.sizes for t in bench.temperatures)
    }
    if bench.compare_transformers:
        _add_transformers(cells, model, bench, prompt_ids)
    for cell, passes in cells.items():
        if cell.temperature == bench.temperatures[0]:
            for name in passes:
                progress(f"warm-up: {name} at {cell.concurrency}")
                passes[name](max(cell.concurrency, num_prompts[cell.concurrency] // WARM_UP_SHARE))
    # All in one thread: a second one that computes would slow down both.
    ceiling = model.compute.run(lambda: measure_ceiling(model, config, bench.sizes))
    pairs: dict[tuple[Cell, str], list[Pair]] = {(cell, name): [] for cell, passes in cells.items() for name in passes}
    for repeat in range(bench.repeats):
        for cell, passes in cells.items():
            for names in turns(list(passes), is_reversed=repeat % 2 == 1):
                results = {}
                for name in names:
                    results[name] = passes[name](num_prompts[cell.concurrency])
                    progress(
                        f"repeat {repeat + 1}/{bench.repeats}: {name} at {cell.concurrency}, T={cell.temperature:g}: "
                        f"{results[name].tokens_per_s:.1f} tokens/s"
                    )
                for name, result in results.items():
                    pairs[cell, name].append((result, results[PLAIN]))
    return {
        "kind": "bench",
        "machine": machine_description(),
        "settings": _settings(bench, config, max(num_prompts.values())),
        "ceiling": ceiling,
        "runs": [{"drafter": name, **asdict(cell), **summary(measured)} for (cell, name), measured in pairs.items()],
    }


def turns(names: Sequence[str], *, is_reversed: bool) -> Iterator[list[str]]:
    """Yield the passes of one repeat in groups of a plain one and those before and after it.

    So each has plain decoding right next to it, and what drifts slowly on the machine hits both alike. `is_reversed`
    turns each group round: what was measured before plain decoding is measured after it the next time.
    """
    others = [name for name in names if name != PLAIN]
    for start in range(0, max(1, len(others)), 2):
        group = [*others[start : start + 1], PLAIN, *others[start + 1 : start + 2]]
        yield group[::-1] if is_reversed else group


def load_variants(
    engine_config: EngineConfig, variants: Sequence[Variant], concurrency: int
) -> tuple[LoadedModel, EngineConfig, dict[str, Engine]]:
    """Return the model, the settings with room for so many requests, and an engine for each variant by its name."""
    config = replace(
        engine_config,
        batching=_roomy_batching(engine_config, concurrency),
        # Every pass sees the same prompts: cached ones would skip the prefill that a first visitor pays.
        cache=replace(engine_config.cache, prefix_caching=False),
    )
    model = load_model(config.model, config)
    return model, config, {variant.name: build_engine(model, variant.config(config)) for variant in variants}


def _passes(engines: dict[str, Engine], bench: BenchConfig, cell: Cell, prompt_ids: list[list[int]]) -> Passes:
    sampling = [_sampling(bench, cell.temperature, index) for index in range(len(prompt_ids))]
    return {name: closed_loop_pass(engine, prompt_ids, sampling, cell.concurrency) for name, engine in engines.items()}


def _add_transformers(
    cells: dict[Cell, Passes], model: LoadedModel, bench: BenchConfig, prompt_ids: list[list[int]]
) -> None:
    baseline = model.compute.run(lambda: TransformersBaseline(model))

    def make_pass(temperature: float) -> Callable[[int], PassResult]:
        return lambda num_prompts: PassResult(
            **model.compute.run(lambda: baseline.run(prompt_ids[:num_prompts], bench.max_tokens, temperature))
        )

    for cell, passes in cells.items():
        if cell.concurrency == 1:
            passes[TRANSFORMERS] = make_pass(cell.temperature)


def _settings(bench: BenchConfig, config: EngineConfig, num_prompts: int) -> dict[str, Any]:
    return asdict(bench) | {
        "num_prompts": num_prompts,  # of the largest pass; each run says what its passes answered
        "temperature": bench.temperatures[0] if len(bench.temperatures) == 1 else None,
        "ceiling_context_len": CEILING_CONTEXT_LEN,
        "engine": asdict(config),
    }


def machine_description() -> dict[str, str | int | None]:
    """Say what the figures were measured on."""
    return {
        "cpu": cpu_name(),
        "torch_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dspark": dspark.__version__,
        "git_sha": _git_sha(),
    }


def measure_ceiling(
    model: LoadedModel, config: EngineConfig, sizes: Sequence[int], repeats: int = 15
) -> dict[str, float]:
    """Return, per concurrency, the tokens/s of the target's forward pass alone: what plain decoding cannot exceed."""
    page_size = config.cache.page_size
    pages_per_row = -(-(CEILING_CONTEXT_LEN + 1) // page_size)
    runner = Runner(model.decoder, num_pages=pages_per_row * max(sizes), page_size=page_size)
    tables = [list(range(r * pages_per_row, (r + 1) * pages_per_row)) for r in range(max(sizes))]
    for table in tables:
        runner.execute([BatchRow(token_ids=[1] * CEILING_CONTEXT_LEN, start_position=0, page_ids=table)])
    ceiling = {}
    for size in sizes:
        rows = [
            BatchRow(token_ids=[1], start_position=CEILING_CONTEXT_LEN, page_ids=table, num_logits=1)
            for table in tables[:size]
        ]
        runner.execute(rows)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            runner.execute(rows)
            times.append(time.perf_counter() - start)
        ceiling[str(size)] = round(size / statistics.median(times), 1)
    return ceiling


def _roomy_batching(config: EngineConfig, concurrency: int) -> BatchingConfig:
    batching = config.batching
    return replace(
        batching,
        max_size=max(resolved_max_size(batching), concurrency),
        max_batch_tokens=max(batching.max_batch_tokens, concurrency),
    )


def _sampling(bench: BenchConfig, temperature: float, index: int) -> SamplingParams:
    seed = None if bench.seed is None else bench.seed + index
    return SamplingParams(temperature=temperature, max_tokens=bench.max_tokens, seed=seed)


def _git_sha() -> str | None:
    """Return the commit of the checkout this package runs from; None outside one."""
    folder = Path(dspark.__file__).parent
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None
