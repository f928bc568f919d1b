"""The figures of a benchmark: what is reported of the passes of one drafter, and how it is printed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import reduce
from typing import Any

from rich.console import Console
from rich.table import Table

from dspark.evaluation.closed_loop import PassResult
from dspark.request import SpeculationStats

Pair = tuple[PassResult, PassResult]  # a pass and the pass of plain decoding next to it


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Reduce the passes of one drafter to medians, with the spread of the throughput and of its ratio to plain."""
    passes = [one for one, _ in pairs]
    rates = [p.tokens_per_s for p in passes]
    ratios = [p.tokens_per_s / q.tokens_per_s for p, q in pairs]
    stats = reduce(SpeculationStats.plus, (p.speculation for p in passes))
    phase_s = {phase: sum(p.phase_s[phase] for p in passes) for phase in passes[0].phase_s}
    total_s = sum(phase_s.values())
    return {
        "num_requests": len(passes[0].token_ids),
        "num_passes": len(passes),
        "output_tokens_per_s": round(statistics.median(rates), 2),
        "output_tokens_per_s_min": round(min(rates), 2),
        "output_tokens_per_s_max": round(max(rates), 2),
        "ratio_to_plain": round(statistics.median(ratios), 3),
        "ratio_to_plain_min": round(min(ratios), 3),
        "ratio_to_plain_max": round(max(ratios), 3),
        "tpot_ms_p50": round(1e3 * statistics.median([t for p in passes for t in p.tpot_s] or [0.0]), 2),
        "ttft_ms_p50": round(1e3 * statistics.median([t for p in passes for t in p.ttft_s]), 2),
        "accepted_length": round(stats.accepted_length, 3) if stats.num_rounds else None,
        "verified_length": round(stats.num_verified / stats.num_rounds, 3) if stats.num_rounds else None,
        "acceptance_rate": round(stats.acceptance_rate, 3) if stats.num_verified else None,
        "declined_share": _declined_share(passes, stats.num_rounds),
        "identical_to_plain": round(
            statistics.fmean(a == b for p, q in pairs for a, b in zip(p.token_ids, q.token_ids, strict=True)), 4
        ),
        "phase_share": {phase: round(s / total_s, 4) for phase, s in phase_s.items()} if total_s else {},
    }


def _declined_share(passes: Sequence[PassResult], num_rounds: int) -> float | None:
    counts = [p.num_declined for p in passes if p.num_declined is not None]
    return round(sum(counts) / num_rounds, 4) if counts and num_rounds else None


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print the ceiling, a table and, last, the report as one JSON line."""
    console.print(f"{report['machine']['cpu']}, {report['machine']['torch_threads']} threads")
    ceiling = ", ".join(f"{rate:g} at {size}" for size, rate in report["ceiling"].items())
    length = report["settings"]["ceiling_context_len"]
    console.print(f"Ceiling of plain decoding (target forward alone at {length} tokens, tokens/s): {ceiling}")
    table = Table(
        "drafter", "T", "at once", "tokens/s", "min..max", "x plain", "min..max", "TPOT ms", "TTFT ms",
        "accepted length", "verified length", "acceptance", "declined", "identical", "outside forward",
    )  # fmt: skip
    for run in report["runs"]:
        table.add_row(
            run["drafter"],
            f"{run['temperature']:g}",
            str(run["concurrency"]),
            f"{run['output_tokens_per_s']:.1f}",
            f"{run['output_tokens_per_s_min']:.1f}..{run['output_tokens_per_s_max']:.1f}",
            f"{run['ratio_to_plain']:.2f}",
            f"{run['ratio_to_plain_min']:.2f}..{run['ratio_to_plain_max']:.2f}",
            f"{run['tpot_ms_p50']:.1f}",
            f"{run['ttft_ms_p50']:.0f}",
            _or_dash(run["accepted_length"]),
            _or_dash(run["verified_length"]),
            _or_dash(run["acceptance_rate"]),
            _or_dash(run["declined_share"]),
            f"{run['identical_to_plain']:.2f}",
            f"{1 - run['phase_share']['forward']:.1%}" if run["phase_share"] else "-",
        )
    console.print(table)
    # Not through the console, which would wrap it.
    print(json.dumps(report))


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
