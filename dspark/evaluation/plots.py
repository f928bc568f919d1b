"""Plots of evaluation results, served or simulated: accepted length by task, acceptance by position, reliability.

A result is the JSON line that `dspark evaluate` ends with. Also plots of a calibration: reliability by position.
Those of benchmarks are in `scheduling_plots.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark.errors import ConfigError, DsparkError
from dspark.speculation.calibration import Calibration, ReliabilityBin

SUFFIXES = (".svg", ".png")
# Okabe and Ito's colours, which people with any colour vision tell apart; markers say the same once more.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_HATCHES = ("", "///", "...", "xxx")  # by temperature
LINES = ("-", "--", ":", "-.")
STYLE: Any = {
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",  # text stays text: small, searchable
    "svg.hashsalt": "dspark",  # the same results give the same file
}
_ALL = "all tasks"


@dataclass(frozen=True, kw_only=True)
class _Series:
    """One drafter at one temperature: `by_task` holds what `RoundCounts.to_json` writes."""

    name: str
    number: int  # of the drafter
    temperature: str
    style: int  # of the temperature
    by_task: dict[str, dict[str, Any]]
    total: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{self.name}, T={self.temperature}"


def check_plot_path(path: Path) -> None:
    """Raise `ConfigError` for a file that no plot can be written to, before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path} must end in .svg or .png, not {path.suffix or 'nothing'}; rename it")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder of {path} does not exist; make it or name another file")


def load_result(path: Path) -> tuple[str, dict[str, Any]]:
    """Read a saved result: the last line of what `dspark evaluate` or `dspark bench` printed.

    Returns what it is ("evaluation", "bench" or "jump") with it. Raises `DsparkError` naming the file.
    """
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        result = json.loads(lines[-1]) if lines else None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DsparkError(
            f"cannot read a result from {path}: {error}; save what dspark evaluate or dspark bench prints"
        ) from error
    if isinstance(result, dict):
        if {"drafter", "temperatures"} <= result.keys():
            return "evaluation", result
        if result.get("kind") in ("bench", "jump") and "runs" in result:
            return result["kind"], result
    raise DsparkError(f"{path} does not end with a result of dspark evaluate or dspark bench; save what it prints")


def plot_results(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw results by name of their drafter into an SVG or PNG file. Raises `DsparkError` when it cannot be written."""
    check_plot_path(path)
    series = _series(results)
    if not series:
        raise DsparkError(f"{', '.join(results)} hold no rounds to plot; evaluate texts of temperature 0 or 1")
    bins = {name: result["reliability"] for name, result in results.items() if result.get("reliability")}
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5 if bins else 8.5, 3.6), layout="constrained")
        axes = figure.subplots(1, 3 if bins else 2, width_ratios=(1.5, 1.2, 1) if bins else (1.4, 1)).tolist()
        _draw_lengths(axes[0], series)
        _draw_acceptance(axes[1], series)
        if bins:
            _draw_reliability(axes[2], bins)
        save_figure(figure, path)


def plot_calibration(calibration: Calibration, path: Path) -> None:
    """Draw how reliable survivals are at each position, at each stage; raises `DsparkError` as `plot_results`."""
    check_plot_path(path)
    num_positions = len(calibration.temperatures)
    num_columns = min(num_positions, 4)
    num_rows = -(-num_positions // num_columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(2.9 * num_columns + 0.6, 2.8 * num_rows + 0.5), layout="constrained")
        axes = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True).flatten().tolist()
        for spare in axes[num_positions:]:
            spare.remove()
        for k in range(num_positions):
            _draw_points(axes[k], "before", 1, _points(calibration.reliability_before[k]))
            if calibration.reliability_refitted is not None:
                _draw_points(axes[k], "refitted head", 2, _points(calibration.reliability_refitted[k]))
            _draw_points(axes[k], "after", 0, _points(calibration.reliability_after[k]))
            before, after = calibration.ece_before[k], calibration.ece_after[k]
            _finish_reliability(axes[k], f"position {k + 1}: ECE {before:.1%}, after {after:.1%}")
            if k + num_columns >= num_positions:
                axes[k].set_xlabel("survival c_1 .. c_k as stated")
                axes[k].tick_params(labelbottom=True)
            if k % num_columns == 0:
                axes[k].set_ylabel("survived")
        axes[0].legend(frameon=False, fontsize=8, loc="upper left")
        save_figure(figure, path)


def _points(bins: Sequence[ReliabilityBin]) -> list[dict[str, Any]]:
    return [asdict(one) for one in bins]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a plot that is the same whenever the figures are. Raises `DsparkError` when that fails."""
    try:
        # Neither the day nor the program's version, so that a redrawn plot differs only where its figures do.
        figure.savefig(path, dpi=150, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise DsparkError(f"cannot write the plot {path}: {error}; name another file") from error


def _series(results: Mapping[str, Mapping[str, Any]]) -> list[_Series]:
    temperatures = sorted({t for result in results.values() for t in result["temperatures"]}, key=float)
    series = []
    for number, (name, result) in enumerate(results.items()):
        for temperature, measured in result["temperatures"].items():
            names = _task_names(list(measured["tasks"]))
            tasks = {names[task]: counts for task, counts in measured["tasks"].items() if counts["num_rounds"]}
            if tasks:
                style = temperatures.index(temperature)
                series.append(
                    _Series(
                        name=name,
                        number=number,
                        temperature=temperature,
                        style=style,
                        by_task=tasks,
                        total=measured["all"],
                    )
                )
    return series


def _task_names(files: Sequence[str]) -> dict[str, str]:
    """Return what to call each file: its stem (its path is nobody's business), numbered where several share one."""
    stems = [Path(file).stem for file in files]
    return {
        file: stem if stem not in stems[:index] else f"{stem} ({stems[: index + 1].count(stem)})"
        for index, (file, stem) in enumerate(zip(files, stems, strict=True))
    }


def _draw_lengths(axes: Axes, series: Sequence[_Series]) -> None:
    tasks = list(dict.fromkeys(task for one in series for task in one.by_task))
    tasks += [_ALL] if len(tasks) > 1 else []
    width = 0.84 / len(series)
    for index, one in enumerate(series):
        values = one.by_task | {_ALL: one.total}
        places = [p for p, task in enumerate(tasks) if task in values]
        heights = [values[tasks[p]]["accepted_length"] for p in places]
        bars = axes.bar(
            [p + (index - (len(series) - 1) / 2) * width for p in places],
            heights,
            width * 0.92,
            color=COLOURS[one.number % len(COLOURS)],
            hatch=_HATCHES[one.style % len(_HATCHES)],
            edgecolor="white",
            linewidth=0,
            label=one.label,
        )
        if len(series) * len(tasks) <= 16:  # more would run into each other
            axes.bar_label(bars, fmt="%.2f", padding=1, fontsize=7)
    axes.axhline(1, color="0.4", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks, rotation=20 if len(tasks) > 6 else 0)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.set_ylabel("tokens per round")
    axes.set_title("Accepted length with the bonus token (line: plain decoding)")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.16))


def _draw_acceptance(axes: Axes, series: Sequence[_Series]) -> None:
    """Draw a line per drafter and temperature, or per task where there is one drafter at one temperature."""
    lines = [(one.label, one.number, one.style, one.total) for one in series]
    if len(series) == 1:
        lines = [(task, number, 0, counts) for number, (task, counts) in enumerate(series[0].by_task.items())]
    longest = 1
    for label, number, style, counts in lines:
        rates = counts["conditional_acceptance"]
        places = [k for k, rate in enumerate(rates) if rate is not None]
        if not places:
            continue  # plain decoding proposes nothing
        longest = max(longest, places[-1] + 1)
        axes.plot(
            [k + 1 for k in places],
            [rates[k] for k in places],
            color=COLOURS[number % len(COLOURS)],
            linestyle=LINES[style % len(LINES)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            label=label,
        )
    axes.set_ylim(0, 1.02)
    axes.set_xlim(0.7, longest + 0.3)
    axes.set_xticks(range(1, longest + 1))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, given all before it")
    axes.set_title("Acceptance by position")
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left", bbox_to_anchor=(0, -0.16))


def _draw_reliability(axes: Axes, bins: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    for number, (name, points) in enumerate(bins.items()):
        _draw_points(axes, name, number, points)
    _finish_reliability(axes, "Reliability (size: number of slots)")
    axes.set_xlabel("confidence")
    axes.set_ylabel("accepted")
    if len(bins) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_points(axes: Axes, label: str, number: int, points: Sequence[Mapping[str, float]]) -> None:
    """Draw one line of reliability, a point for each bin."""
    total = sum(point["num_slots"] for point in points)
    colour = COLOURS[number % len(COLOURS)]
    confidences, rates = ([point[key] for point in points] for key in ("confidence", "acceptance"))
    axes.plot(confidences, rates, color=colour, linewidth=1, label=label)
    axes.scatter(
        confidences,
        rates,
        s=[8 + 120 * point["num_slots"] / total for point in points],
        color=colour,
        marker=MARKERS[number % len(MARKERS)],
        alpha=0.7,
    )


def _finish_reliability(axes: Axes, title: str) -> None:
    axes.plot([0, 1], [0, 1], color="0.4", linewidth=0.8, zorder=0)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_title(title)
