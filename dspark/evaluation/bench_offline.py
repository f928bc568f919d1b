"""Offline benchmark: the same prompts through several drafters and concurrencies, interleaved in one run.

Plain decoding is always measured beside the drafters, so that every figure has its baseline in the same run.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import dspark
from dspark.batch import BatchRow
from dspark.config import BatchingConfig, EngineConfig, resolved_max_size
from dspark.engine.build import LoadedModel, build_engine, load_model
from dspark.engine.capacity_cache import cpu_name
from dspark.engine.engine import Engine
from dspark.engine.runner import Runner
from dspark.errors import ConfigError
from dspark.evaluation.prompts import PromptRecord
from dspark.evaluation.transformers_baseline import TransformersBaseline
from dspark.request import Request, SamplingParams, SpeculationStats

PLAIN = "none"
TRANSFORMERS = "transformers"  # `transformers.generate`, one stream at a time, as a baseline
CEILING_CONTEXT_LEN = 64  # tokens of context in the forward pass timed as ceiling


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure."""

    drafters: tuple[str, ...] = ("none", "ngram")
    concurrency: tuple[int, ...] = (1, 4, 16)
    max_tokens: int = 64
    temperature: float = 0.0
    repeats: int = 3
    seed: int | None = None  # request i gets seed + i; with it sampled text can be compared with the plain run's
    compare_transformers: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The concurrencies to run; the transformers baseline needs plain decoding at 1 beside it."""
        return tuple(dict.fromkeys((*self.concurrency, *((1,) if self.compare_transformers else ()))))

    def __post_init__(self) -> None:
        for name in ("max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} ({getattr(self, name)}) must be at least 1")
        if not self.drafters or not self.concurrency or min(self.concurrency) < 1:
            raise ConfigError(
                f"drafters ({self.drafters}) and concurrency ({self.concurrency}) need at least one entry, "
                "and every concurrency must be at least 1"
            )


@dataclass(kw_only=True)
class PassResult:
    """One pass over all prompts with one drafter at one concurrency."""

    wall_s: float
    token_ids: list[list[int]]  # per prompt
    ttft_s: list[float]
    tpot_s: list[float]  # of prompts with two tokens or more
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    phase_s: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.wall_s


def run_bench(
    engine_config: EngineConfig,
    bench: BenchConfig,
    prompts: Sequence[PromptRecord],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> dict:
    """Measure and return `{"machine", "settings", "ceiling", "runs"}`; `progress` gets a line per pass."""
    if max(bench.concurrency) > len(prompts):
        raise ConfigError(
            f"concurrency ({max(bench.concurrency)}) exceeds the number of prompts ({len(prompts)}); lower it or give "
            "more prompts"
        )
    config = replace(
        engine_config,
        batching=_roomy_batching(engine_config, max(bench.concurrency)),
        # Every pass sees the same prompts: cached ones would skip the prefill that a first visitor pays.
        cache=replace(engine_config.cache, prefix_caching=False),
    )
    model = load_model(config.model, config)
    engines = {name: _engine_for(model, config, name) for name in dict.fromkeys((PLAIN, *bench.drafters))}
    prompt_ids = [prompt.token_ids(model.tokenizer) for prompt in prompts]
    requests = [_sampling(bench, index) for index in range(len(prompts))]
    passes: dict[tuple[str, int], Callable[[], PassResult]] = {
        (name, size): _closed_loop_pass(engine, prompt_ids, requests, size)
        for size in bench.sizes
        for name, engine in engines.items()
    }
    if bench.compare_transformers:
        baseline = TransformersBaseline(model)
        passes[TRANSFORMERS, 1] = lambda: PassResult(**baseline.run(prompt_ids, bench.max_tokens, bench.temperature))
    for name, one_pass in passes.items():
        progress(f"warm-up: {name[0]} at {name[1]}")
        one_pass()
    ceiling = measure_ceiling(model, config, bench.sizes)
    results: dict[tuple[str, int], list[PassResult]] = {key: [] for key in passes}
    for repeat in range(bench.repeats):
        for key, one_pass in passes.items():
            result = one_pass()
            results[key].append(result)
            progress(f"repeat {repeat + 1}/{bench.repeats}: {key[0]} at {key[1]}: {result.tokens_per_s:.1f} tokens/s")
    return {
        "machine": machine_description(),
        "settings": {"num_prompts": len(prompts), **asdict(bench), "engine": asdict(config)},
        "ceiling": ceiling,
        "runs": [_summary(key, results) for key in results if key[0] in (*bench.drafters, PLAIN, TRANSFORMERS)],
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


def _engine_for(model: LoadedModel, config: EngineConfig, drafter: str) -> Engine:
    return build_engine(model, replace(config, drafter=drafter))


def _sampling(bench: BenchConfig, index: int) -> SamplingParams:
    seed = None if bench.seed is None else bench.seed + index
    return SamplingParams(temperature=bench.temperature, max_tokens=bench.max_tokens, seed=seed)


def _closed_loop_pass(
    engine: Engine, prompt_ids: list[list[int]], sampling: list[SamplingParams], concurrency: int
) -> Callable[[], PassResult]:
    """Return a function that serves all prompts, `concurrency` at a time, the next starting when one ends."""

    def one_pass() -> PassResult:
        waiting = [
            Request(request_id=str(i), prompt_token_ids=ids, sampling=params)
            for i, (ids, params) in enumerate(zip(prompt_ids, sampling, strict=True))
        ][::-1]
        tokens: list[list[int]] = [[] for _ in prompt_ids]
        started, first, last = ([0.0] * len(prompt_ids) for _ in range(3))
        stats = SpeculationStats()
        phases_before = engine.metrics.phase_seconds()
        start = time.perf_counter()
        num_open = 0
        while waiting or num_open:
            while waiting and num_open < concurrency:
                request = waiting.pop()
                started[int(request.request_id)] = time.perf_counter()
                engine.add_request(request)
                num_open += 1
            for output in engine.step():
                index, now = int(output.request_id), time.perf_counter()
                first[index] = first[index] or now
                last[index] = now
                tokens[index] += output.token_ids
                if output.finish_reason is not None:
                    num_open -= 1
                    stats = stats.plus(output.speculation)
        wall_s = time.perf_counter() - start
        phases = engine.metrics.phase_seconds()
        return PassResult(
            wall_s=wall_s,
            token_ids=tokens,
            ttft_s=[f - s for f, s in zip(first, started, strict=True)],
            tpot_s=[(e - f) / (len(t) - 1) for e, f, t in zip(last, first, tokens, strict=True) if len(t) > 1],
            speculation=stats,
            phase_s={phase: phases[phase] - phases_before[phase] for phase in phases},
        )

    return one_pass


def _summary(key: tuple[str, int], results: dict[tuple[str, int], list[PassResult]]) -> dict:
    """Reduce the repeats of one drafter and concurrency to medians, with the spread of the throughput."""
    drafter, concurrency = key
    passes, plain = results[key], results[PLAIN, concurrency]
    rates = [p.tokens_per_s for p in passes]
    ratios = [p.tokens_per_s / q.tokens_per_s for p, q in zip(passes, plain, strict=True)]
    stats = reduce(SpeculationStats.plus, (p.speculation for p in passes))
    phase_s = {phase: sum(p.phase_s[phase] for p in passes) for phase in passes[0].phase_s}
    total_s = sum(phase_s.values())
    return {
        "drafter": drafter,
        "concurrency": concurrency,
        "output_tokens_per_s": round(statistics.median(rates), 2),
        "output_tokens_per_s_min": round(min(rates), 2),
        "output_tokens_per_s_max": round(max(rates), 2),
        "ratio_to_plain": round(statistics.median(ratios), 3),
        "ratio_to_plain_min": round(min(ratios), 3),
        "ratio_to_plain_max": round(max(ratios), 3),
        "tpot_ms_p50": round(1e3 * statistics.median([t for p in passes for t in p.tpot_s] or [0.0]), 2),
        "ttft_ms_p50": round(1e3 * statistics.median([t for p in passes for t in p.ttft_s]), 2),
        "accepted_length": round(stats.accepted_length, 3) if stats.num_rounds else None,
        "acceptance_rate": round(stats.acceptance_rate, 3) if stats.num_verified else None,
        "identical_to_plain": round(
            statistics.fmean(
                a == b
                for p, q in zip(passes, plain, strict=True)
                for a, b in zip(p.token_ids, q.token_ids, strict=True)
            ),
            4,
        ),
        "phase_share": {phase: round(s / total_s, 4) for phase, s in phase_s.items()} if total_s else {},
    }


def print_report(report: dict, console: Console) -> None:
    """Print the ceiling, a table and, last, the report as one JSON line."""
    console.print(f"{report['machine']['cpu']}, {report['machine']['torch_threads']} threads")
    ceiling = ", ".join(f"{rate:g} at {size}" for size, rate in report["ceiling"].items())
    console.print(
        f"Ceiling of plain decoding (target forward alone at {CEILING_CONTEXT_LEN} tokens, tokens/s): {ceiling}"
    )
    table = Table(
        "drafter",
        "concurrency",
        "tokens/s",
        "min..max",
        "x plain",
        "min..max",
        "TPOT ms",
        "TTFT ms",
        "accepted length",
        "acceptance",
        "identical",
        "outside forward",
    )
    for run in report["runs"]:
        outside = f"{1 - run['phase_share']['forward']:.1%}" if run["phase_share"] else "-"
        table.add_row(
            run["drafter"],
            str(run["concurrency"]),
            f"{run['output_tokens_per_s']:.1f}",
            f"{run['output_tokens_per_s_min']:.1f}..{run['output_tokens_per_s_max']:.1f}",
            f"{run['ratio_to_plain']:.2f}",
            f"{run['ratio_to_plain_min']:.2f}..{run['ratio_to_plain_max']:.2f}",
            f"{run['tpot_ms_p50']:.1f}",
            f"{run['ttft_ms_p50']:.0f}",
            _or_dash(run["accepted_length"]),
            _or_dash(run["acceptance_rate"]),
            f"{run['identical_to_plain']:.2f}",
            outside,
        )
    console.print(table)
    print(json.dumps(report))


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _git_sha() -> str | None:
    """Return the commit of the checkout this package runs from; None outside one."""
    folder = Path(dspark.__file__).parent
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None
