"""Plots of soaks and load tests over time: memory, requests and pages, and latencies with what is compared of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dspark.errors import DsparkError
from dspark.evaluation.plots import COLOURS, LINES, STYLE, check_plot_path, save_figure

_TIMES = {"times to first token": 1, "times per token": 2}  # where `times` of a report holds them
_BACKGROUND = "0.93"


def plot_traffic(report: Mapping[str, Any], path: Path) -> None:
    """Draw what `dspark soak` or `dspark load` reports; raises `DsparkError` when there is nothing to draw."""
    check_plot_path(path)
    samples = report["samples"]
    if not samples:
        raise DsparkError(f"the {report['kind']} report holds no samples to draw; measure for longer")
    times = report.get("times", [])
    with rc_context(STYLE):
        figure = Figure(figsize=(8.5, 8.0 if times else 5.0), layout="constrained")
        panels = figure.subplots(4 if times else 2, 1, sharex=True).tolist()
        _draw_memory(panels[0], samples)
        _draw_requests(panels[1], samples)
        for axes, (name, place) in zip(panels[2:], _TIMES.items(), strict=False):
            _draw_times(axes, name, [(one[0], one[place]) for one in times if one[place] is not None])
        for axes in panels:
            for name, window in report["windows"].items():
                if "memory" not in name:
                    axes.axvspan(window["start_s"], window["end_s"], color=_BACKGROUND, zorder=0)
        named = [name for name in report["windows"] if "memory" not in name]
        panels[0].set_title(f"{report['kind']}: {report['duration_s']:.0f} s (grey: {' and '.join(named)})")
        panels[-1].set_xlabel("seconds")
        save_figure(figure, path)


def _draw_memory(axes: Axes, samples: Sequence[Mapping[str, float]]) -> None:
    axes.plot(
        [one["at_s"] for one in samples],
        [one["memory_bytes"] / 2**20 for one in samples],
        color=COLOURS[0],
        linewidth=1.2,
    )
    axes.set_ylabel("server's memory (MiB)")
    axes.set_ylim(bottom=0)


def _draw_requests(axes: Axes, samples: Sequence[Mapping[str, float]]) -> None:
    seconds = [one["at_s"] for one in samples]
    for number, name in enumerate(("num_running", "num_waiting")):
        axes.plot(
            seconds,
            [one[name] for one in samples],
            color=COLOURS[number],
            linestyle=LINES[number],
            linewidth=1.0,
            label=name.removeprefix("num_"),
        )
    axes.plot([], [], color=COLOURS[2], linestyle=LINES[2], label="pages in use (right)")
    axes.set_ylabel("requests")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
    pages = axes.twinx()
    pages.plot(seconds, [one["kv_cache_usage"] for one in samples], color=COLOURS[2], linestyle=LINES[2], linewidth=1.0)
    pages.set_ylim(0, 1.05)
    pages.set_ylabel("share of pages")


def _draw_times(axes: Axes, name: str, points: Sequence[tuple[float, float]]) -> None:
    axes.scatter(
        [at for at, _ in points], [value for _, value in points], s=3, color=COLOURS[0], alpha=0.5, linewidth=0
    )
    axes.set_yscale("log")
    axes.set_ylabel(f"{name} (ms)")
