"""The verb `dspark profile`: measures this machine anew and shows what confidence scheduling will reckon with."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.cli_engine import add_engine_flags, engine_config
from dspark.errors import DsparkError

if TYPE_CHECKING:
    from rich.console import Console

    from dspark.speculation.capacity import MeasuredTimes

PROFILE_TEXT = (
    "Measure this machine anew: seconds of a target pass by its tokens at two context lengths, of a drafting pass by "
    "its requests. Later starts with these settings read the result; do it when nothing else runs."
)


def add_profile_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `dspark profile`."""
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help="write the result there too: an SPS file, for --capacity-file and for other engines",
    )  # fmt: skip
    add_engine_flags(parser)


def run_profile(args: argparse.Namespace) -> int:
    """Measure as the flags say; print tables and the files that hold the result."""
    config = engine_config(args)
    if args.output is not None and args.output.is_dir():
        raise DsparkError(f"--output ({args.output}) is a folder; name a file in it")

    from rich.console import Console

    from dspark.engine.build import build_engine, load_model
    from dspark.engine.capacity_cache import MADE_FOR, capacity_path
    from dspark.speculation.capacity import write_measured_times

    # Whatever schedules with these settings: the times are the same, and "auto" is sure to want them.
    speculation = replace(config.speculation, scheduler="auto", confidence_threshold=None, capacity_file=None)
    config = replace(config, speculation=speculation)
    engine = build_engine(load_model(config.model, config), config, measure_anew=True)
    assert engine.planner is not None and engine.planner.times is not None, config.speculation
    measured = engine.planner.times.measured
    print_measured(measured, Console(width=None if sys.stdout.isatty() else 120))
    print(capacity_path(measured.details[MADE_FOR]))
    if args.output is not None:
        write_measured_times(args.output, measured)
        print(args.output)
    return 0


def print_measured(measured: MeasuredTimes, console: Console) -> None:
    """Print a table of target passes and one of drafting passes."""
    from rich.table import Table

    made_for, peak = measured.details.get("made_for", {}), measured.details.get("peak_bytes_per_s")
    if made_for:
        console.print(
            f"{made_for['model']} in {made_for['dtype']} on {made_for['hardware']}, {made_for['num_threads']} threads",
            highlight=False,
        )
    if peak is not None:
        console.print(f"memory is read at {peak / 1e9:.1f} GB/s at best", highlight=False)
    columns = ["tokens of a pass", "ms", "tokens/s"]
    if measured.long_target is not None:
        columns[1:] = [
            f"{text} at context {length}"
            for length in (measured.context_len, measured.long_context_len)
            for text in ("ms", "tokens/s")
        ]
    targets = [measured.target] if measured.long_target is None else [measured.target, measured.long_target]
    table = Table(*columns)
    for index, size in enumerate(measured.target.sizes):
        cells = [text for c in targets for text in (f"{1e3 * c.seconds[index]:.2f}", f"{size / c.seconds[index]:.1f}")]
        table.add_row(str(size), *cells)
    console.print(table)
    if measured.draft is not None:
        table = Table("requests of a drafting pass", "ms")
        for size, seconds in zip(measured.draft.sizes, measured.draft.seconds, strict=True):
            table.add_row(str(size), f"{1e3 * seconds:.2f}")
        console.print(table)
