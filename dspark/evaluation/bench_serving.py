"""What HTTP costs on top of the engine: throughput against the engine in this process, and time to the first event.

Both get the same prompts, interleaved in one run; the server is a process of its own, as it is for users.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from dspark.config import EngineConfig
from dspark.errors import ConfigError, DsparkError
from dspark.evaluation.bench_offline import load_variants, machine_description
from dspark.evaluation.bench_variant import Variant
from dspark.evaluation.closed_loop import PassResult, closed_loop_pass
from dspark.evaluation.http_call import Call, CallResult, Outcome, perform
from dspark.evaluation.prompts import PromptRecord
from dspark.evaluation.server_process import CALL_TIMEOUT_S, ServerProcess, running_server, served_model
from dspark.evaluation.traffic import COMPLETIONS, STREAM
from dspark.request import SamplingParams

NUM_FIRST_EVENTS = 30  # calls whose first event is timed
_TTFT = "vllm:time_to_first_token_seconds_sum"


@dataclass(frozen=True, kw_only=True)
class ServingBenchConfig:
    """What to measure; all greedy."""

    drafters: tuple[str, ...] = ("none", "auto")  # names of variants, see `Variant.parse`
    concurrency: int = 16
    num_prompts: int = 32  # of a pass
    max_tokens: int = 64
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("concurrency", "num_prompts", "max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} ({getattr(self, name)}) must be at least 1; raise it")
        for drafter in self.drafters:
            Variant.parse(drafter)  # raises `ConfigError`


def run_bench_serving(
    engine_config: EngineConfig,
    bench: ServingBenchConfig,
    prompts: Sequence[PromptRecord],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure and return `{"kind", "machine", "settings", "runs"}`; `progress` gets a line per pass."""
    if bench.num_prompts > len(prompts):
        raise ConfigError(
            f"num_prompts ({bench.num_prompts}) is more than there are ({len(prompts)}); lower it or give more prompts"
        )
    variants = [Variant.parse(name) for name in dict.fromkeys(bench.drafters)]
    model, config, engines = load_variants(engine_config, variants, bench.concurrency)
    prompt_ids = [prompt.token_ids(model.tokenizer) for prompt in prompts[: bench.num_prompts]]
    sampling = [SamplingParams(temperature=0.0, max_tokens=bench.max_tokens)] * len(prompt_ids)
    runs = []
    for variant in variants:
        engine_pass = closed_loop_pass(engines[variant.name], prompt_ids, sampling, bench.concurrency)
        with _server_of(variant.config(config)) as server:
            name, _ = served_model(server)
            calls = [_call(name, ids, bench.max_tokens) for ids in prompt_ids]
            http_pass = partial(http_tokens_per_s, server.url, calls, bench.concurrency)
            rates = _interleaved(
                {"engine": partial(_engine_tokens_per_s, engine_pass, len(prompt_ids)), "http": http_pass},
                bench.repeats,
                partial(_named, progress, variant.name),
            )
            firsts = first_event_ms(server.url, [_call(name, ids, 1) for ids in prompt_ids])
        runs.append({"drafter": variant.name, **summary(rates["engine"], rates["http"], firsts)})
    return {
        "kind": "bench_serving",
        "machine": machine_description(),
        "settings": asdict(bench) | {"engine": asdict(config)},
        "runs": runs,
    }


def _engine_tokens_per_s(one_pass: Callable[[int], PassResult], num_prompts: int) -> float:
    return one_pass(num_prompts).tokens_per_s


def _named(progress: Callable[[str], None], name: str, line: str) -> None:
    progress(f"{name}: {line}")


@contextmanager
def _server_of(config: EngineConfig) -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="dspark-") as folder:
        path = Path(folder) / "engine.yaml"
        path.write_text(yaml.safe_dump(asdict(config)), encoding="utf-8")
        with running_server(["--log-level", "warning", "--config", str(path)]) as server:
            yield server


def _interleaved(
    sides: dict[str, Callable[[], float]], repeats: int, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return the rates of each side; pass i of one is next to pass i of the other, in turn before it and after it."""
    for side in sides.values():
        side()  # warms up
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in list(sides)[:: 1 if repeat % 2 == 0 else -1]:
            rates[name].append(sides[name]())
            progress(f"repeat {repeat + 1}/{repeats}, {name}: {rates[name][-1]:.1f} tokens/s")
    return rates


def _call(model: str, prompt_ids: list[int], max_tokens: int) -> Call:
    body = {"model": model, "prompt": prompt_ids, "max_tokens": max_tokens, "temperature": 0, **STREAM}
    return Call(kind="bench", path=COMPLETIONS, body=body)


def http_tokens_per_s(url: str, calls: Sequence[Call], concurrency: int) -> float:
    """Return output tokens per second of streams over HTTP, so many at a time, the next starting when one ends."""

    async def client(http: httpx.AsyncClient, waiting: Iterator[Call], results: list[CallResult]) -> None:
        while (call := next(waiting, None)) is not None:
            results.append(await _answered(http, call))

    async def one_pass() -> float:
        results: list[CallResult] = []
        async with httpx.AsyncClient(base_url=url, timeout=CALL_TIMEOUT_S) as http:
            waiting = iter(calls)
            start = time.perf_counter()
            await asyncio.gather(*(client(http, waiting, results) for _ in range(concurrency)))
            return sum(result.num_tokens for result in results) / (time.perf_counter() - start)

    return asyncio.run(one_pass())


def first_event_ms(url: str, calls: Sequence[Call]) -> list[float]:
    """Return, call by call, how many milliseconds after the engine's first token a client has it.

    One call at a time, each of one token: with more, the engine would draft before it hands out the first. The engine's
    part is read from /metrics, so that what a prefill takes, and how it varies, is on neither side.
    """

    async def measure() -> list[float]:
        taken = []
        async with httpx.AsyncClient(base_url=url, timeout=CALL_TIMEOUT_S) as http:
            for index in range(NUM_FIRST_EVENTS):
                before_s = _engine_ttft_s((await http.get("/metrics")).text)
                result = await _answered(http, calls[index % len(calls)])
                after_s = _engine_ttft_s((await http.get("/metrics")).text)
                assert result.ttft_s is not None, result
                taken.append(1e3 * (result.ttft_s - (after_s - before_s)))
        return taken

    return asyncio.run(measure())


async def _answered(http: httpx.AsyncClient, call: Call) -> CallResult:
    result = CallResult(call=call)
    await perform(http, result)
    if result.outcome is not Outcome.ANSWERED:
        raise DsparkError(f"a call of the benchmark was {result.outcome}: {result.problem} {result.detail}")
    return result


def _engine_ttft_s(metrics: str) -> float:
    """Return the sum of all times to first token that the engine has measured."""
    samples = (s for family in text_string_to_metric_families(metrics) for s in family.samples)
    return sum(sample.value for sample in samples if sample.name == _TTFT)


def summary(engine_rates: Sequence[float], http_rates: Sequence[float], firsts_ms: Sequence[float]) -> dict[str, Any]:
    """Reduce passes to medians, with the spread of the ratio of passes next to each other."""
    ratios = [http / engine for http, engine in zip(http_rates, engine_rates, strict=True)]
    return {
        "num_passes": len(ratios),
        "engine_tokens_per_s": round(statistics.median(engine_rates), 2),
        "http_tokens_per_s": round(statistics.median(http_rates), 2),
        "http_per_engine": round(statistics.median(ratios), 4),
        "http_per_engine_min": round(min(ratios), 4),
        "http_per_engine_max": round(max(ratios), 4),
        "first_event_after_engine_ms_p50": round(statistics.median(firsts_ms), 3),
        "first_event_after_engine_ms_min": round(min(firsts_ms), 3),
        "first_event_after_engine_ms_max": round(max(firsts_ms), 3),
    }


def print_serving(report: dict[str, Any], console: Console) -> None:
    """Print a table and, last, the report as one JSON line."""
    machine, settings = report["machine"], report["settings"]
    console.print(f"{machine['cpu']}, {machine['torch_threads']} threads, {settings['concurrency']} streams")
    table = Table(
        "drafter", "engine tokens/s", "HTTP tokens/s", "HTTP per engine", "min..max", "first event after engine, ms",
        "min..max",
    )  # fmt: skip
    for run in report["runs"]:
        table.add_row(
            run["drafter"],
            f"{run['engine_tokens_per_s']:.1f}",
            f"{run['http_tokens_per_s']:.1f}",
            f"{run['http_per_engine']:.3f}",
            f"{run['http_per_engine_min']:.3f}..{run['http_per_engine_max']:.3f}",
            f"{run['first_event_after_engine_ms_p50']:.2f}",
            f"{run['first_event_after_engine_ms_min']:.2f}..{run['first_event_after_engine_ms_max']:.2f}",
        )
    console.print(table)
    # Not through the console, which would wrap it.
    print(json.dumps(report))
