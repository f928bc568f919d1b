"""What happens when the load jumps: verified length, acceptance and waiting, step by step around the jump.

Requests are replaced as they end, so that the load is even before the jump and after it.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

from rich.console import Console
from rich.table import Table

from dspark.config import EngineConfig
from dspark.engine.engine import Engine
from dspark.errors import ConfigError, DsparkError
from dspark.evaluation.bench_offline import load_variants, machine_description
from dspark.evaluation.bench_variant import PLAIN, Variant
from dspark.evaluation.prompts import PromptRecord
from dspark.request import FinishReason, Request, RequestOutput, SamplingParams, SpeculationStats

WINDOW = 10  # steps whose rounds are counted together when levels are compared
SETTLED_MARGIN = 0.1  # tokens of verified length


@dataclass(frozen=True, kw_only=True)
class JumpConfig:
    """What to measure."""

    before: int  # requests at a time
    after: int  # the same after the jump
    drafters: tuple[str, ...] = ("auto",)  # names of variants, see `Variant.parse`; plain decoding is left out
    max_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 3
    num_steps_before: int = 100  # counted from when all the first requests decode
    num_steps_after: int = 200

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(Variant.parse(name) for name in dict.fromkeys(self.drafters) if name != PLAIN)

    def __post_init__(self) -> None:
        if not 1 <= self.before < self.after:
            raise ConfigError(
                f"the load cannot jump from {self.before} to {self.after}; give two rising numbers as 2:10"
            )
        for name in ("max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} ({getattr(self, name)}) must be at least 1")
        if min(self.num_steps_before, self.num_steps_after) < 2 * WINDOW:
            raise ConfigError(
                f"{self.num_steps_before} steps before the jump and {self.num_steps_after} after it are too few; "
                f"measure at least {2 * WINDOW}"
            )
        if not self.variants:
            raise ConfigError(f"drafters ({self.drafters}) names none that verifies anything; add auto")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises `RequestError` naming it


@dataclass(kw_only=True)
class StepCounts:
    """What steps at one place before or after the jump did, added up over the repeats."""

    num_steps: int = 0
    num_rounds: int = 0  # requests that decoded
    num_verified: int = 0
    num_accepted: int = 0
    num_emitted: int = 0
    seconds: float = 0.0

    def add(self, rounds: SpeculationStats, seconds: float) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_rounds += rounds.num_rounds
        self.num_verified += rounds.num_verified
        self.num_accepted += rounds.num_accepted
        self.num_emitted += rounds.num_emitted
        self.seconds += seconds


@dataclass(kw_only=True)
class JumpSteps:
    """The steps around jumps, and the longest waits in them."""

    before: list[StepCounts]
    after: list[StepCounts]
    all_decode: list[int] = field(default_factory=list)  # of each jump: steps until all requests had a token
    longest_gap: int = 0  # steps between two outputs of a request


def run_jump(
    engine_config: EngineConfig,
    jump: JumpConfig,
    prompts: Sequence[PromptRecord],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure and return `{"kind", "machine", "settings", "runs"}`; `progress` gets a line per jump.

    Prompts are used in turn, and again from the first one when all were.
    """
    model, config, engines = load_variants(engine_config, jump.variants, jump.after)
    prompt_ids = [prompt.token_ids(model.tokenizer) for prompt in prompts]
    runs = []
    for name, engine in engines.items():
        for temperature in jump.temperatures:
            progress(f"warm-up: {name}, T={temperature:g}")
            requests = _requests(prompt_ids, SamplingParams(temperature=temperature, max_tokens=jump.max_tokens))
            _one_jump(engine, jump, requests, _no_steps(jump))
            steps = _no_steps(jump)
            for repeat in range(jump.repeats):
                _one_jump(engine, jump, requests, steps)
                progress(f"jump {repeat + 1}/{jump.repeats}: {name}, T={temperature:g}")
            runs.append({"drafter": name, "temperature": temperature, **jump_summary(steps)})
    return {
        "kind": "jump",
        "machine": machine_description(),
        "settings": {"num_prompts": len(prompts), **asdict(jump), "engine": asdict(config)},
        "runs": runs,
    }


def settled_after(steps: Sequence[StepCounts]) -> int:
    """Return from which step on the verified length stays where it is in the second half of the steps.

    Compared are the lengths of all `WINDOW` steps in a row; where they lie in the second half, a margin added, is
    where they have to stay.
    """
    lengths = [_verified_length(steps[at : at + WINDOW]) for at in range(len(steps) - WINDOW + 1)]
    late = lengths[len(steps) // 2 :] or lengths[-1:]
    low, high = min(late) - SETTLED_MARGIN, max(late) + SETTLED_MARGIN
    return max((at + 1 for at, length in enumerate(lengths) if not low <= length <= high), default=0)


def jump_summary(steps: JumpSteps) -> dict[str, Any]:
    """Return levels before and after, what changed and how fast, the longest waits and the curves."""
    settled = settled_after(steps.after)
    before, after = _level(steps.before), _level(steps.after[len(steps.after) // 2 :])
    rates = before["acceptance_rate"], after["acceptance_rate"]
    return {
        "before": before,
        "after": after,
        "settled_after_steps": settled,
        "acceptance_change_points": None if None in rates else round(100 * (rates[1] - rates[0]), 2),
        "all_decode_after_steps": max(steps.all_decode),
        "longest_gap_steps": steps.longest_gap,
        "steps": {"before": [asdict(one) for one in steps.before], "after": [asdict(one) for one in steps.after]},
    }


def print_jumps(report: dict[str, Any], console: Console) -> None:
    """Print a table and, last, the report as one JSON line."""
    settings = report["settings"]
    console.print(f"{report['machine']['cpu']}, {report['machine']['torch_threads']} threads")
    console.print(f"Load from {settings['before']} to {settings['after']} requests, {settings['repeats']} times")
    table = Table(
        "drafter", "T", "verified length before", "after", "settled after steps", "acceptance before", "after",
        "change, points", "tokens/s before", "after", "all decode after steps", "longest gap, steps",
    )  # fmt: skip
    for run in report["runs"]:
        before, after = run["before"], run["after"]
        table.add_row(
            run["drafter"],
            f"{run['temperature']:g}",
            f"{before['verified_length']:.2f}",
            f"{after['verified_length']:.2f}",
            str(run["settled_after_steps"]),
            _or_dash(before["acceptance_rate"]),
            _or_dash(after["acceptance_rate"]),
            _or_dash(run["acceptance_change_points"]),
            f"{before['output_tokens_per_s']:.1f}",
            f"{after['output_tokens_per_s']:.1f}",
            str(run["all_decode_after_steps"]),
            str(run["longest_gap_steps"]),
        )
    console.print(table)
    # Not through the console, which would wrap it.
    print(json.dumps(report))


def _no_steps(jump: JumpConfig) -> JumpSteps:
    return JumpSteps(
        before=[StepCounts() for _ in range(jump.num_steps_before)],
        after=[StepCounts() for _ in range(jump.num_steps_after)],
    )


def _requests(prompt_ids: Sequence[list[int]], sampling: SamplingParams) -> Iterator[Request]:
    for number in count():
        ids = prompt_ids[number % len(prompt_ids)]
        yield Request(request_id=str(number), prompt_token_ids=ids, sampling=sampling)


def _one_jump(engine: Engine, jump: JumpConfig, requests: Iterator[Request], steps: JumpSteps) -> None:
    """Run the engine from the first requests to some time after the jump, and add its steps to `steps`."""
    load = _Load(engine, requests)
    load.grow(jump.before)
    first = set(load.without_token)
    while first & load.without_token:
        load.step()
    for counts in steps.before:
        counts.add(*load.step())
    load.grow(jump.after)
    new, load.longest_gap = set(load.without_token), 0
    all_decode = None
    for number, counts in enumerate(steps.after, 1):
        counts.add(*load.step())
        if all_decode is None and not new & load.without_token:
            all_decode = number
    load.end()
    if all_decode is None:
        raise DsparkError(
            f"not all {jump.after} requests had a token {jump.num_steps_after} steps after the jump; give the engine "
            "more room (--cache-tokens, --max-batch-tokens) or let the load jump less"
        )
    steps.all_decode.append(all_decode)
    steps.longest_gap = max(steps.longest_gap, load.longest_gap)


class _Load:
    """Keeps a number of requests open in an engine and counts what its steps do."""

    def __init__(self, engine: Engine, requests: Iterator[Request]) -> None:
        self.without_token: set[str] = set()  # open requests that had no output yet
        self.longest_gap = 0
        self._engine = engine
        self._requests = requests
        self._stats: dict[str, SpeculationStats] = {}  # of open requests, as of their latest output
        self._seen: dict[str, int] = {}  # step of the latest output of open requests that had one
        self._num_steps = 0

    def grow(self, num_requests: int) -> None:
        """Start requests until so many are open."""
        while len(self._stats) < num_requests:
            self._start()

    def step(self) -> tuple[SpeculationStats, float]:
        """Run one step, replace who ended, and return the rounds of the step and its seconds."""
        start = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start
        self._num_steps += 1
        rounds = SpeculationStats()
        for output in outputs:
            rounds = rounds.plus(self._rounds_of(output))
            if output.finish_reason is not None:
                if output.finish_reason is FinishReason.ERROR:
                    raise DsparkError(f"a request failed: {output.error}")
                self._close(output.request_id)
                self._start()
        return rounds, seconds

    def end(self) -> None:
        """Abort what is open and empty the engine."""
        for request_id in self._stats:
            self._engine.abort(request_id)
        while self._engine.has_unfinished():
            self._engine.step()
        self._stats, self._seen, self.without_token = {}, {}, set()

    def _start(self) -> None:
        request = next(self._requests)
        self._engine.add_request(request)
        self._stats[request.request_id] = SpeculationStats()
        self.without_token.add(request.request_id)

    def _close(self, request_id: str) -> None:
        del self._stats[request_id]
        self._seen.pop(request_id, None)
        self.without_token.discard(request_id)

    def _rounds_of(self, output: RequestOutput) -> SpeculationStats:
        """Return what the latest step added to a request's counts."""
        request_id, now = output.request_id, output.speculation
        before = self._stats[request_id]
        self._stats[request_id] = now
        if request_id in self._seen:
            self.longest_gap = max(self.longest_gap, self._num_steps - self._seen[request_id])
        self._seen[request_id] = self._num_steps
        self.without_token.discard(request_id)
        return SpeculationStats(
            num_rounds=now.num_rounds - before.num_rounds,
            num_verified=now.num_verified - before.num_verified,
            num_accepted=now.num_accepted - before.num_accepted,
            num_emitted=now.num_emitted - before.num_emitted,
        )


def _verified_length(steps: Sequence[StepCounts]) -> float:
    return sum(s.num_verified for s in steps) / max(1, sum(s.num_rounds for s in steps))


def _level(steps: Sequence[StepCounts]) -> dict[str, Any]:
    num_verified, num_accepted = sum(s.num_verified for s in steps), sum(s.num_accepted for s in steps)
    num_emitted, seconds = sum(s.num_emitted for s in steps), sum(s.seconds for s in steps)
    return {
        "verified_length": round(_verified_length(steps), 3),
        "acceptance_rate": round(num_accepted / num_verified, 4) if num_verified else None,
        "num_verified": num_verified,
        "output_tokens_per_s": round(num_emitted / seconds, 2),
        "step_ms_p50": round(1e3 * statistics.median(s.seconds / s.num_steps for s in steps), 2),
    }


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
