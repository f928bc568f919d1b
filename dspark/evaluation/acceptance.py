"""Served acceptance: prompt files through the real engine, and what each round proposed, accepted and emitted.

A task is one prompt file. Texts, not speed, are measured here: no other work must shorten a draft.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dspark.config import EngineConfig
from dspark.engine.build import load_engine
from dspark.engine.engine import Engine
from dspark.errors import DsparkError, RequestError
from dspark.evaluation.prompts import load_prompts
from dspark.evaluation.serving_config import ServingConfig
from dspark.request import MAX_DRAFT_TOKENS, FinishReason, Request, RequestOutput, SamplingParams, SpeculationStats
from dspark.speculation.round_counts import RoundCounts


@dataclass(frozen=True, kw_only=True)
class Round:
    """One decoding pass of one request."""

    num_proposed: int  # tokens of the draft that were checked
    num_accepted: int
    num_emitted: int


@dataclass(kw_only=True)
class ServedText:
    """One answer and the rounds that made it."""

    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    finish_reason: FinishReason | None = None
    error: str | None = None

    def add(self, output: RequestOutput) -> None:
        """Take the next output of the request; its statistics are those so far, so they grow by one round or none."""
        before, now = self.stats, output.speculation
        if now.num_rounds > before.num_rounds:
            assert now.num_rounds == before.num_rounds + 1, (before, now)
            self.rounds.append(
                Round(
                    num_proposed=now.num_verified - before.num_verified,
                    num_accepted=now.num_accepted - before.num_accepted,
                    num_emitted=now.num_emitted - before.num_emitted,
                )
            )
        self.token_ids += output.token_ids
        self.stats, self.finish_reason, self.error = now, output.finish_reason, output.error


@dataclass(frozen=True, kw_only=True)
class ServedAcceptance:
    """What serving one task, or all of them, counted."""

    rounds: RoundCounts
    stats: SpeculationStats
    finish_reasons: dict[str, int]

    @classmethod
    def of(cls, texts: Sequence[ServedText]) -> ServedAcceptance:
        counts = RoundCounts(num_texts=len(texts))
        for round_ in (round_ for text in texts for round_ in text.rounds):
            counts.add_round(
                num_proposed=round_.num_proposed, num_accepted=round_.num_accepted, num_emitted=round_.num_emitted
            )
        reasons = Counter(text.finish_reason.value for text in texts if text.finish_reason is not None)
        stats = reduce(SpeculationStats.plus, (text.stats for text in texts), SpeculationStats())
        return cls(rounds=counts, stats=stats, finish_reasons=dict(sorted(reasons.items())))

    def to_json(self) -> dict[str, Any]:
        """Return counts and figures as JSON values."""
        return {
            **self.rounds.to_json(),
            "num_drafted": self.stats.num_drafted,
            "num_verified": self.stats.num_verified,
            "num_accepted": self.stats.num_accepted,
            "finish_reasons": self.finish_reasons,
        }


Task = list[list[int]]  # prompts as token ids
Results = dict[str, dict[str, ServedAcceptance]]  # by temperature, then by task


def load_serving_engine(config: EngineConfig, serving: ServingConfig) -> Engine:
    """Load an engine that verifies every draft in full, whatever its chances, and computes prompts from their start."""
    longest = config.speculation.num_draft_tokens
    longest = MAX_DRAFT_TOKENS if longest is None else longest
    batching = replace(
        config.batching,
        min_size=1,
        max_size=serving.concurrency,
        # Prefill takes at most half of what the anchors leave; the other half must hold a whole draft for everyone.
        max_batch_tokens=max(config.batching.max_batch_tokens, serving.concurrency * (1 + 2 * longest)),
    )
    speculation = replace(config.speculation, scheduler="fixed", confidence_threshold=None)
    cache = replace(config.cache, prefix_caching=False)
    return load_engine(replace(config, speculation=speculation, batching=batching, cache=cache))


def load_tasks(files: Sequence[str], engine: Engine, serving: ServingConfig) -> dict[str, Task]:
    """Read prompt files as the model sees them and check every prompt. Raises `DsparkError` naming the prompt."""
    tasks = {}
    for name in files:
        prompts = [record.token_ids(engine.tokenizer) for record in load_prompts(name)[: serving.num_prompts]]
        for number, prompt in enumerate(prompts, 1):
            try:
                engine.validate(_request(number, prompt, serving, serving.temperatures[0]))
            except RequestError as error:
                raise DsparkError(f"{name}, prompt {number}: {error}") from error
        tasks[name] = prompts
    return tasks


def measure_served(
    engine: Engine,
    tasks: Mapping[str, Task],
    serving: ServingConfig,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Results:
    """Answer the prompts of all tasks at each temperature and count their rounds.

    `progress` gets the number of prompts answered and their total. Ctrl-C leaves the engine empty.
    """
    prompts = [prompt for task in tasks.values() for prompt in task]
    results: Results = {}
    total = len(serving.temperatures) * len(prompts)
    for number, temperature in enumerate(serving.temperatures):
        requests = [_request(i, prompt, serving, temperature) for i, prompt in enumerate(prompts)]
        report = partial(_report, progress, before=number * len(prompts), total=total)
        texts = iter(serve_texts(engine, requests, progress=report))
        results[f"{temperature:g}"] = {
            name: ServedAcceptance.of([next(texts) for _ in task]) for name, task in tasks.items()
        }
    return results


def serve_texts(
    engine: Engine, requests: Sequence[Request], *, progress: Callable[[int], None] = lambda done: None
) -> list[ServedText]:
    """Answer requests and return their texts with their rounds, in order."""
    texts = {request.request_id: ServedText() for request in requests}
    num_done = 0
    try:
        for request in requests:
            engine.add_request(request)
        while engine.has_unfinished():
            for output in engine.step():
                texts[output.request_id].add(output)
                num_done += output.finish_reason is not None
            progress(num_done)
    finally:  # also after Ctrl-C
        for request in requests:
            engine.abort(request.request_id)
        while engine.has_unfinished():
            engine.step()
    return list(texts.values())


def total_of(by_task: Mapping[str, ServedAcceptance]) -> ServedAcceptance:
    """Return the counts of all tasks together."""
    reasons: Counter[str] = Counter()
    for one in by_task.values():
        reasons.update(one.finish_reasons)
    return ServedAcceptance(
        rounds=reduce(RoundCounts.plus, (one.rounds for one in by_task.values())),
        stats=reduce(SpeculationStats.plus, (one.stats for one in by_task.values())),
        finish_reasons=dict(sorted(reasons.items())),
    )


def to_json(results: Results) -> dict[str, Any]:
    """Return the counts by temperature, of each task and of all together, as JSON values."""
    return {
        temperature: {
            "tasks": {name: one.to_json() for name, one in by_task.items()},
            "all": total_of(by_task).to_json(),
        }
        for temperature, by_task in results.items()
    }


def print_served(results: Results, console: Console) -> None:
    """Print a table of tasks by temperature."""
    table = Table(title="served acceptance; rounds without a proposal count with length 1")
    for column in (
        "T", "task", "prompts", "rounds", "accepted length", "acceptance by position", "survival by position",
        "drafted", "checked", "accepted", "ended by",
    ):  # fmt: skip
        table.add_column(column)
    for temperature, by_task in results.items():
        for name, one in (*by_task.items(), *((("all", total_of(by_task)),) if len(by_task) > 1 else ())):
            rounds = one.rounds
            table.add_row(
                temperature,
                Path(name).stem,
                str(rounds.num_texts),
                str(rounds.num_rounds),
                _number(rounds.accepted_length),
                " ".join(map(_number, rounds.conditional_acceptance)),
                " ".join(map(_number, rounds.survival)),
                str(one.stats.num_drafted),
                str(one.stats.num_verified),
                str(one.stats.num_accepted),
                ", ".join(f"{reason} {count}" for reason, count in one.finish_reasons.items()),
            )
        table.add_section()
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _report(progress: Callable[[int, int], None], done: int, *, before: int, total: int) -> None:
    progress(before + done, total)


def _request(index: int, prompt: Sequence[int], serving: ServingConfig, temperature: float) -> Request:
    seed = None if serving.seed is None else serving.seed + index
    sampling = SamplingParams(temperature=temperature, max_tokens=serving.max_tokens, seed=seed)
    return Request(request_id=f"prompt-{index}", prompt_token_ids=prompt, sampling=sampling)
