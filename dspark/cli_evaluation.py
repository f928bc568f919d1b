"""The verbs `dspark evaluate`, `calibrate` and `plot`: their flags, and what they print."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.config import DEFAULT_MODEL, VERIFICATIONS, EngineConfig, SpeculationConfig
from dspark.errors import DsparkError

if TYPE_CHECKING:
    from rich.console import Console

EVALUATE_TEXT = (
    "Measure a drafter: offline, along conversations that its target wrote, or with --served by answering the prompts "
    "with the engine. Accepted length with the bonus token, acceptance by position, offline also the quality of the "
    "confidence; a table, then one JSON line."
)
PLOT_TEXT = (
    "Draw results of dspark evaluate, those of several drafters side by side: accepted length by task, acceptance by "
    "position, reliability of the confidence. Or one of dspark bench: speed and verified length by number of requests, "
    "or both around a jump of the load."
)
CALIBRATE_TEXT = (
    "Fit a drafter's confidences to what is accepted (Sequential Temperature Scaling), on rounds along conversations "
    "that its target wrote and that it was not trained on. Writes sts.json, which serving reads beside the drafter; "
    "prints temperatures and calibration errors by position, and the file. --refit-head first corrects a confidence "
    "head that trusts itself too much on new text, and changes the drafter's weights."
)
# Flags of one of the two ways to measure; the other refuses them.
_OFFLINE = ("held_out", "num_sequences", "num_anchors", "num_round_texts", "max_length")
_SERVED = ("temperatures", "max_tokens", "num_prompts", "concurrency", "num_draft_tokens", "verification")


def add_evaluate_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `dspark evaluate`; those of one way to measure stay out of the namespace unless given."""
    parser.add_argument("drafter", help="folder of the drafter; with --served as for serve --drafter")
    parser.add_argument(
        "data", nargs="+", metavar="FILE",
        help="JSON lines, one result each: conversations as for dspark train, or with --served any prompts",
    )  # fmt: skip
    parser.add_argument("--target", default=DEFAULT_MODEL, help="as for serve --model")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument(
        "--seed", type=int,
        help="of the anchors (None: 0); with --served request i gets SEED + i and `coupled` verification, whose "
        "acceptance differs (None: fresh seeds)",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the result into an .svg or .png file")
    parser.add_argument("--served", action="store_true", help="answer the prompts with the engine and count its rounds")
    offline = parser.add_argument_group("offline")

    def add(group: Any, flag: str, default: Any, text: str, **more: Any) -> None:
        group.add_argument(flag, default=argparse.SUPPRESS, help=f"{text} (default: {default})", **more)

    add(
        offline, "--held-out", None, "only what a training run with this --hold-out-fraction held out", type=float,
        metavar="FRACTION",
    )  # fmt: skip
    add(offline, "--num-sequences", "all", "conversations of each file at most", type=int)
    add(offline, "--num-anchors", 64, "blocks per conversation", type=int)
    add(
        offline, "--num-round-texts", 32, "conversations of each temperature along which serving is simulated",
        type=int,
    )  # fmt: skip
    add(offline, "--max-length", 2048, "tokens of a conversation; longer ones are cut", type=int)
    served = parser.add_argument_group("with --served")
    add(served, "--temperatures", "0,1", "each prompt is answered at each of them", type=_temperatures)
    add(served, "--max-tokens", 128, "tokens per answer at most", type=int)
    add(served, "--num-prompts", "all", "prompts of each file at most", type=int)
    add(served, "--concurrency", 8, "requests at a time", type=int)
    add(served, "--num-draft-tokens", "the drafter's full block", "drafted tokens a round at most", type=int)
    add(served, "--verification", SpeculationConfig.verification, "rule for unseeded requests", choices=VERIFICATIONS)


def add_calibrate_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `dspark calibrate`."""
    parser.add_argument("drafter", help="folder of the drafter")
    parser.add_argument("data", nargs="+", metavar="FILE", help="JSON lines, conversations as for dspark train")
    parser.add_argument("--target", default=DEFAULT_MODEL, help="as for serve --model")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument(
        "--held-out", type=float, metavar="FRACTION",
        help="only what a training run with this --hold-out-fraction held out (None: all conversations)",
    )  # fmt: skip
    parser.add_argument(
        "--temperatures", type=_temperatures, default=(0.0, 1.0), help="use the texts of these: 0, 1 or both"
    )
    parser.add_argument("--num-sequences", type=int, help="conversations of each file at most (None: all)")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a conversation; longer ones are cut")
    parser.add_argument("--seed", type=int, default=0, help="of the drafts at temperature 1")
    parser.add_argument(
        "--refit-head", action="store_true",
        help="also fit the confidence head anew and store it in the drafter's weights; all other tensors stay",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, metavar="FILE", help="None: sts.json in the drafter's folder, replaced")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw reliability by position, before and after, as .svg or .png"
    )


def add_plot_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `dspark plot`."""
    parser.add_argument(
        "results", nargs="+", metavar="[NAME=]FILE",
        help="what dspark evaluate printed, and what to call its drafter; or one file with what dspark bench printed",
    )  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="an .svg or .png file")


def run_evaluate(args: argparse.Namespace) -> int:
    """Measure as the flags say and print the results; 1 when a request failed."""
    from rich.console import Console

    from dspark.evaluation.plots import check_plot_path, plot_results

    _check_flags(args)
    if args.plot is not None:
        check_plot_path(args.plot)
    console = Console(width=None if sys.stdout.isatty() else 160)
    result, num_failed = _served(args, console) if args.served else (_offline(args, console), 0)
    if args.plot is not None:
        plot_results({_drafter_name(args.drafter): result}, args.plot)
    # Not through the console, which would wrap it.
    print(json.dumps(result))
    return int(num_failed > 0)


def run_calibrate(args: argparse.Namespace) -> int:
    """Calibrate as the flags say; write the file, and print what it says and where it is."""
    from rich.console import Console
    from rich.progress import Progress

    from dspark.evaluation.bench_offline import machine_description
    from dspark.evaluation.plots import check_plot_path, plot_calibration
    from dspark.models.drafter_calibration import CALIBRATION
    from dspark.training.calibrate import calibrate_drafter, print_calibration

    output = Path(args.drafter) / CALIBRATION if args.output is None else args.output
    _check_calibrate_flags(args, output)
    if args.plot is not None:
        check_plot_path(args.plot)
    with Progress(console=_status(), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("Simulating rounds", total=None)
        fitted = calibrate_drafter(
            Path(args.drafter), args.data,
            target=args.target, held_out_only=args.held_out, temperatures=args.temperatures,
            num_sequences=args.num_sequences, max_length=args.max_length, refit_head=args.refit_head,
            seed=args.seed, device=args.device,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    dataset = ", ".join(Path(name).name for name in args.data)
    made_by = {"dataset": dataset, "command": ["dspark", *sys.argv[1:]], "seed": args.seed}
    fitted.store(Path(args.drafter), output, made_by | {"machine": machine_description()})
    if args.plot is not None:
        plot_calibration(fitted.calibration, args.plot)
    print_calibration(fitted.calibration, Console(width=None if sys.stdout.isatty() else 160))
    print(output)
    return 0


def run_plot(args: argparse.Namespace) -> int:
    """Draw saved results and print where."""
    from dspark.evaluation.plots import check_plot_path, load_result, plot_results
    from dspark.evaluation.scheduling_plots import plot_bench, plot_jump

    check_plot_path(args.output)
    results: dict[str, dict[str, Any]] = {}
    for argument in args.results:
        name, _, file = argument.rpartition("=")
        kind, result = load_result(Path(file))
        if kind != "evaluation":
            if name or len(args.results) > 1:
                raise DsparkError(
                    f"{file} is a result of dspark bench, which is drawn alone; give nothing but the file"
                )
            (plot_bench if kind == "bench" else plot_jump)(result, args.output)
            break
        name = name or _drafter_name(result["drafter"])
        if name in results:
            raise DsparkError(f"two results are called {name!r}; name them: one={file} other=...")
        results[name] = result
    else:
        plot_results(results, args.output)
    print(args.output)
    return 0


def _offline(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    from dspark.training.evaluate import evaluate, print_evaluations, to_json

    if not Path(args.drafter).is_dir():
        raise DsparkError(
            f"the drafter ({args.drafter}) is not a folder, which offline evaluation needs; give the folder of a "
            "trained drafter, or add --served to measure any drafter"
        )
    for name in args.data:
        _check_answers(name)
    settings = {name: getattr(args, name) for name in _OFFLINE if hasattr(args, name)}
    if "held_out" in settings:
        settings["held_out_only"] = settings.pop("held_out")
    results = evaluate(
        Path(args.drafter), args.data, target=args.target, seed=args.seed or 0, device=args.device, **settings
    )
    print_evaluations(results, console)
    return _head(args, "offline", settings) | to_json(results)


def _served(args: argparse.Namespace, console: Console) -> tuple[dict[str, Any], int]:
    """Return the result and how many requests failed."""
    from dataclasses import asdict

    from rich.progress import Progress

    from dspark.evaluation.acceptance import load_serving_engine, load_tasks, measure_served, print_served, to_json
    from dspark.evaluation.serving_config import ServingConfig

    given = {name: getattr(args, name) for name in _SERVED if hasattr(args, name)}
    speculation = SpeculationConfig(
        **{name: given.pop(name) for name in ("num_draft_tokens", "verification") if name in given}
    )
    serving = ServingConfig(seed=args.seed, **given)
    config = EngineConfig(model=args.target, drafter=args.drafter, device=args.device, speculation=speculation)
    engine = load_serving_engine(config, serving)
    tasks = load_tasks(args.data, engine, serving)
    with Progress(console=_status(), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task("Answering")
        results = measure_served(
            engine, tasks, serving, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    print_served(results, console)
    num_failed = sum(one.finish_reasons.get("error", 0) for by_task in results.values() for one in by_task.values())
    if num_failed:
        print(f"dspark: error: {num_failed} requests failed; the log says why", file=sys.stderr)
    settings = asdict(serving) | asdict(speculation)
    return _head(args, "served", settings) | {"temperatures": to_json(results)}, num_failed


def _status() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _head(args: argparse.Namespace, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    from dspark.evaluation.bench_offline import machine_description

    return {
        "kind": kind,
        "drafter": args.drafter,
        "target": args.target,
        "seed": args.seed,
        "settings": settings,
        "command": ["dspark", *sys.argv[1:]],
        "machine": machine_description(),
    }


def _check_flags(args: argparse.Namespace) -> None:
    for name in _OFFLINE if args.served else _SERVED:
        if hasattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            other = "is of offline evaluation; leave it or --served out" if args.served else "needs --served; add it"
            raise DsparkError(f"{flag} ({getattr(args, name)}) {other}")
    for name, low in {"num_anchors": 1, "max_length": 1, "num_sequences": 1, "num_round_texts": 0}.items():
        value = getattr(args, name, low)
        if value < low:
            raise DsparkError(f"--{name.replace('_', '-')} ({value}) must be at least {low}; raise it")


def _check_calibrate_flags(args: argparse.Namespace, output: Path) -> None:
    if not Path(args.drafter).is_dir():
        raise DsparkError(f"the drafter ({args.drafter}) is not a folder; give the folder of a trained drafter")
    if args.refit_head and args.output is not None:
        raise DsparkError(
            f"--output ({args.output}) does not go with --refit-head, which changes the drafter: its temperatures "
            "belong beside it; leave --output out, and copy the drafter first to keep the old one"
        )
    if output.is_dir() or not output.parent.is_dir():
        raise DsparkError(f"--output ({output}) is a folder or in none that exists; name a file, or make its folder")
    for name in ("num_sequences", "max_length"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise DsparkError(f"--{name.replace('_', '-')} ({value}) must be at least 1; raise it")
    for name in args.data:
        _check_answers(name)


def _check_answers(name: str) -> None:
    """Raise `DsparkError` for a file of prompts without any answer."""
    from dspark.training.dataset import read_records

    records = read_records(Path(name))
    if any(_is_answered(record) for _, record in records):
        return
    place, record = records[0]
    if {"prompt", "turns", "messages", "prompt_ids"} & record.keys():
        raise DsparkError(
            f"{place} has the keys {', '.join(sorted(record))} and no answer, nor has any other line; add --served to "
            "let the engine answer, or give prompt_ids and response_ids, or messages with the assistant's"
        )


def _is_answered(record: dict[str, Any]) -> bool:
    messages = record.get("messages")
    if not isinstance(messages, list):
        return "response_ids" in record
    return any(isinstance(message, dict) and message.get("role") == "assistant" for message in messages)


def _drafter_name(drafter: str) -> str:
    """Return what to call a drafter in a plot: a folder by its last part."""
    return Path(drafter).name or drafter


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers separated by commas, such as 0,1") from error
