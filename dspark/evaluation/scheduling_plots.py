"""Plots of benchmarks: speed and verified length over the number of requests, and both around a jump of the load.

What is drawn is the JSON line that `dspark bench` ends with, without or with `--jump`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from dspark.errors import DsparkError
from dspark.evaluation.bench_variant import PLAIN
from dspark.evaluation.plots import COLOURS, LINES, MARKERS, STYLE, check_plot_path, save_figure

_OUTSIDE = (PLAIN, "transformers")  # baselines, which verify nothing
_SMOOTHED = 10  # steps around a jump that a point of a curve is made of
_SVG_WIDTH = 8.5


def plot_bench(report: Mapping[str, Any], path: Path) -> None:
    """Draw speed over plain decoding and verified length by concurrency, a row of panels for each temperature."""
    check_plot_path(path)
    runs = [run for run in report["runs"] if run["drafter"] not in _OUTSIDE]
    if not runs:
        raise DsparkError("the result holds plain decoding alone; measure a drafter beside it")
    names = list(dict.fromkeys(run["drafter"] for run in runs))
    temperatures = list(dict.fromkeys(run["temperature"] for run in runs))
    sizes = sorted({run["concurrency"] for run in runs})
    with rc_context(STYLE):
        figure = Figure(figsize=(_SVG_WIDTH, 2.9 * len(temperatures) + 0.5), layout="constrained")
        rows = figure.subplots(len(temperatures), 2, squeeze=False, sharex=True)
        for (speed, length), temperature in zip(rows.tolist(), temperatures, strict=True):
            for number, name in enumerate(names):
                of_name = [r for r in runs if r["drafter"] == name and r["temperature"] == temperature]
                of_name.sort(key=lambda run: run["concurrency"])
                _draw_speed(speed, name, number, of_name)
                _draw_length(length, name, number, of_name)
            speed.axhline(1, color="0.4", linewidth=0.8)
            speed.set_title(f"Speed per plain decoding, T={temperature:g} (bars: range)")
            length.set_title(f"Verified length, T={temperature:g}")
            length.set_ylabel("drafted tokens per round")
            length.set_ylim(bottom=0)
        for axes in rows[-1]:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_xlabel("requests at once")
        rows[-1][0].legend(frameon=False, fontsize=8, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.18))
        save_figure(figure, path)


def plot_jump(report: Mapping[str, Any], path: Path) -> None:
    """Draw requests that decode, verified length and acceptance, step by step around the jump."""
    check_plot_path(path)
    with rc_context(STYLE):
        figure = Figure(figsize=(_SVG_WIDTH, 6.0), layout="constrained")
        size, length, acceptance = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1.5, 1.5)).tolist()
        for number, run in enumerate(report["runs"]):
            style = {
                "color": COLOURS[number % len(COLOURS)],
                "linestyle": LINES[number % len(LINES)],
                "linewidth": 1.2,
                "label": f"{_label(run['drafter'])}, T={run['temperature']:g}",
            }
            _draw_jump(size, length, acceptance, run["steps"], style)
        for axes in (size, length, acceptance):
            axes.axvline(0, color="0.4", linewidth=0.8)
            axes.set_ylim(bottom=0)
        settings = report["settings"]
        size.set_title(
            f"From {settings['before']} to {settings['after']} requests, mean of {settings['repeats']} jumps"
        )
        size.set_ylabel("decoding")
        length.set_ylabel("verified length")
        acceptance.set_ylabel(f"acceptance\n({_SMOOTHED} steps)")
        acceptance.set_ylim(0, 1.02)
        acceptance.set_xlabel("steps after the jump")
        acceptance.legend(frameon=False, fontsize=8, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.25))
        save_figure(figure, path)


def _draw_speed(axes: Axes, name: str, number: int, runs: Sequence[Mapping[str, Any]]) -> None:
    ratios = [run["ratio_to_plain"] for run in runs]
    below = [run["ratio_to_plain"] - run["ratio_to_plain_min"] for run in runs]
    above = [run["ratio_to_plain_max"] - run["ratio_to_plain"] for run in runs]
    sizes = [run["concurrency"] for run in runs]
    axes.errorbar(sizes, ratios, yerr=(below, above), capsize=2, elinewidth=0.8, **_line(name, number))


def _draw_length(axes: Axes, name: str, number: int, runs: Sequence[Mapping[str, Any]]) -> None:
    known = [(run["concurrency"], run["verified_length"]) for run in runs if run["verified_length"] is not None]
    axes.plot([size for size, _ in known], [length for _, length in known], **_line(name, number))


def _line(name: str, number: int) -> dict[str, Any]:
    is_fixed = "@" in name
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 4,
        "linestyle": LINES[1] if is_fixed else LINES[0],
        "linewidth": 1.0 if is_fixed else 1.6,
        "label": _label(name),
    }


def _draw_jump(
    size: Axes, length: Axes, acceptance: Axes, steps: Mapping[str, Sequence[Mapping[str, Any]]], style: dict[str, Any]
) -> None:
    before, after = steps["before"], steps["after"]
    places = list(range(-len(before), len(after)))
    both = [*before, *after]
    size.plot(places, [one["num_rounds"] / one["num_steps"] for one in both], **style)
    decoding = [(place, one) for place, one in zip(places, both, strict=True) if one["num_rounds"]]
    length.plot([p for p, _ in decoding], [one["num_verified"] / one["num_rounds"] for _, one in decoding], **style)
    # A point looks back, and not over the jump; the line has a gap there.
    rates = []
    for start, part in ((-len(before), before), (0, after)):
        rates.append((start, math.nan))
        for at in range(_SMOOTHED, len(part) + 1):
            window = part[at - _SMOOTHED : at]
            num_verified = sum(one["num_verified"] for one in window)
            if num_verified:
                rates.append((start + at - 1, sum(one["num_accepted"] for one in window) / num_verified))
    acceptance.plot([place for place, _ in rates], [rate for _, rate in rates], **style)


def _label(name: str) -> str:
    return Path(name).name or name  # the path of a folder is nobody's business
