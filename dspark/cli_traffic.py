"""The verbs `dspark soak` and `dspark load`: what a server stands, measured from outside."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dspark.errors import DsparkError

SOAK_TEXT = (
    "Start a server and soak it in mixed traffic: clients that leave, bad requests, a drafter that fails. Nothing "
    "unexplained may happen, and the end must be like the beginning; exit status 1 says that a bound is missed."
)
LOAD_TEXT = (
    "Start a server and load it with many streams at once, of which some read slowly or hang up in the second half. "
    "Nothing may be lost, and the others must not be slowed; exit status 1 says that a bound is missed."
)
EXIT_MISSED = 1
EXIT_INTERRUPTED = 130


def add_soak_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `dspark soak`."""
    parser.add_argument("--duration", type=float, default=1200.0, metavar="SECONDS", help="of the traffic")
    parser.add_argument("--clients", type=int, default=16, help="clients, each with one call after the other")
    _add_common_flags(parser)


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `dspark load`."""
    parser.add_argument("--duration", type=float, default=120.0, metavar="SECONDS", help="of the traffic")
    parser.add_argument("--streams", type=int, default=200, help="streams at once")
    _add_common_flags(parser)


def _add_common_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument(
        "--rehearse-tokens", type=int, default=256, metavar="N",
        help="before the traffic run a pass of each size up to this, so that memory can be compared",
    )  # fmt: skip
    parser.add_argument("--prompts", metavar="SET", default="mixed", help="as for dspark bench")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report there as one JSON line")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the run into an .svg or .png file")
    parser.add_argument("serve_flags", nargs="*", metavar="-- FLAGS", help="flags of dspark serve")


def run_soak_verb(args: argparse.Namespace) -> int:
    """Soak as the flags say; 1 when a bound is missed, 130 after Ctrl-C."""
    from dspark.evaluation.soak import SoakConfig, run_soak

    config = SoakConfig(
        duration_s=args.duration, num_clients=args.clients, seed=args.seed, rehearsed_tokens=args.rehearse_tokens
    )
    return _measure(args, lambda texts, progress: run_soak(config, args.serve_flags, texts, progress=progress))


def run_load_verb(args: argparse.Namespace) -> int:
    """Load as the flags say; 1 when a bound is missed, 130 after Ctrl-C."""
    from dspark.evaluation.load_test import LoadConfig, run_load

    config = LoadConfig(
        duration_s=args.duration, num_streams=args.streams, seed=args.seed, rehearsed_tokens=args.rehearse_tokens
    )
    return _measure(args, lambda texts, progress: run_load(config, args.serve_flags, texts, progress=progress))


def _measure(args: argparse.Namespace, run: Any) -> int:
    from rich.console import Console

    from dspark.durable_file import write_durably
    from dspark.evaluation.bench_offline import machine_description
    from dspark.evaluation.plots import check_plot_path
    from dspark.evaluation.prompts import load_prompts
    from dspark.evaluation.traffic_plots import plot_traffic
    from dspark.evaluation.traffic_report import is_good, missed_line, print_traffic

    if args.plot is not None:
        check_plot_path(args.plot)
    if args.report is not None and not args.report.parent.is_dir():
        raise DsparkError(f"the folder of --report ({args.report}) does not exist; make it or name another file")
    texts = [text for record in load_prompts(args.prompts) if (text := record.prompt or "".join(record.turns[:1]))]
    if not texts:
        raise DsparkError(f"{args.prompts} holds no texts; give a file with the key prompt or turns")
    status = Console(stderr=True)
    report = run(texts, lambda line: status.print(line, highlight=False, markup=False, soft_wrap=True))
    report |= {"command": ["dspark", *sys.argv[1:]], "machine": machine_description()}
    if args.report is not None:
        write_durably(args.report, json.dumps(report) + "\n")
    if args.plot is not None:
        plot_traffic(report, args.plot)
    print_traffic(report, Console(width=None if sys.stdout.isatty() else 160))
    if report["is_interrupted"]:
        print("dspark: interrupted; the report is of what was measured so far", file=sys.stderr)
        return EXIT_INTERRUPTED
    if not is_good(report):
        print(f"dspark: missed: {missed_line(report)}", file=sys.stderr)
        return EXIT_MISSED
    return 0
