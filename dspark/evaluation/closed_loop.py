"""A number of requests that is always the same: when one ends, the next one starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dspark.engine.engine import Engine
from dspark.request import Request, SamplingParams, SpeculationStats

DECLINED_BY_PLAN = ("not_worth_it", "resting")  # reasons of `dspark:drafts_declined`


@dataclass(kw_only=True)
class PassResult:
    """One pass over all prompts with one drafter at one concurrency."""

    wall_s: float
    token_ids: list[list[int]]  # per prompt
    ttft_s: list[float]
    tpot_s: list[float]  # of prompts with two tokens or more
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_declined: int | None = None  # rounds whose request the planner kept out of the drafting pass
    phase_s: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.wall_s


def closed_loop_pass(
    engine: Engine, prompt_ids: Sequence[list[int]], sampling: Sequence[SamplingParams], concurrency: int
) -> Callable[[int], PassResult]:
    """Return a function that serves so many prompts, `concurrency` at a time, the next starting when one ends."""

    def one_pass(num_prompts: int) -> PassResult:
        waiting = [
            Request(request_id=str(i), prompt_token_ids=prompt_ids[i], sampling=sampling[i]) for i in range(num_prompts)
        ][::-1]
        tokens: list[list[int]] = [[] for _ in range(num_prompts)]
        started, first, last = ([0.0] * num_prompts for _ in range(3))
        stats = SpeculationStats()
        phases_before, declined_before = engine.metrics.phase_seconds(), _num_declined(engine)
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
            num_declined=None if engine.drafting is None else _num_declined(engine) - declined_before,
            phase_s={phase: phases[phase] - phases_before[phase] for phase in phases},
        )

    return one_pass


def _num_declined(engine: Engine) -> int:
    samples = (
        engine.metrics.registry.get_sample_value(
            "dspark:drafts_declined_total", {"model_name": engine.model_name, "reason": reason}
        )
        for reason in DECLINED_BY_PLAN
    )
    return int(sum(sample or 0.0 for sample in samples))
