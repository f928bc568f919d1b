"""The verbs `dspark train` and `dspark evaluate`: their flags, and what they print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.config import DEFAULT_MODEL
from dspark.errors import DsparkError

if TYPE_CHECKING:
    from dspark.training.trainer import TrainResult

TRAIN_TEXT = (
    "Train a drafter on conversations that the target wrote. Data: JSON lines with prompt_ids and response_ids, or "
    "with messages (and tools) for the target's chat template. The step-N folders in the output are drafters; "
    "log.jsonl and run.json tell the story. Ctrl-C ends after the step at hand, with a checkpoint. On several GPUs: "
    "torchrun --nproc-per-node 8 -m dspark.cli train ... --device cuda."
)
EVALUATE_TEXT = (
    "Measure a drafter offline on conversations of its target: accepted length with the bonus token, acceptance by "
    "position, quality of the confidence; a table, then one JSON line."
)


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting of a training run; its type, default and meaning are those of `TrainConfig`."""
    from dspark.training.config import TrainConfig

    for setting in fields(TrainConfig):
        flag, text, kind = f"--{setting.name.replace('_', '-')}", setting.metadata["help"], str(setting.type)
        if setting.name == "data":
            parser.add_argument("data", nargs="+", metavar="FILE", help=text)
        elif kind == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=setting.default, help=text)
        elif setting.default is MISSING:
            parser.add_argument(flag, required=True, default=argparse.SUPPRESS, help=text)
        else:
            kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "tuple[int, ...]": _integers}
            convert = kinds.get(kind.removesuffix(" | None"), str)
            parser.add_argument(flag, type=convert, default=setting.default, help=text)


def run_train(args: argparse.Namespace) -> TrainResult:
    """Train as the flags say and print the newest checkpoint."""
    from dspark.training.config import TrainConfig
    from dspark.training.trainer import train

    settings = {setting.name: getattr(args, setting.name) for setting in fields(TrainConfig)}
    result = train(TrainConfig(**settings | {"data": tuple(args.data)}))
    print(result.checkpoint)
    if result.is_interrupted:
        print(f"dspark: stopped at step {result.step} of {result.total_steps}; --resume goes on", file=sys.stderr)
    return result


def add_evaluate_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `dspark evaluate`."""
    parser.add_argument("drafter", help="folder of the drafter, a step-N folder of a training run or any other")
    parser.add_argument("data", nargs="+", metavar="FILE", help="JSON lines, as for dspark train; one result each")
    parser.add_argument("--target", default=DEFAULT_MODEL, help="as for serve --model")
    parser.add_argument(
        "--held-out", type=float, metavar="FRACTION",
        help="only what a training run with this --hold-out-fraction held out; None: all conversations",
    )  # fmt: skip
    parser.add_argument("--num-sequences", type=int, help="conversations of each file at most; None: all")
    parser.add_argument("--num-anchors", type=int, default=64, help="blocks per conversation")
    parser.add_argument("--max-length", type=int, default=2048, help="tokens of a conversation; longer ones are cut")
    parser.add_argument("--seed", type=int, default=0, help="of the anchors")
    parser.add_argument("--device", default="cpu", help="torch device")


def run_evaluate(args: argparse.Namespace) -> int:
    """Measure as the flags say and print the results."""
    from rich.console import Console

    from dspark.training.evaluate import evaluate, print_evaluations

    for flag in ("num_anchors", "max_length", "num_sequences"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise DsparkError(f"--{flag.replace('_', '-')} ({value}) must be at least 1; raise it")
    results = evaluate(
        Path(args.drafter), args.data, target=args.target, held_out_only=args.held_out, seed=args.seed,
        num_sequences=args.num_sequences, num_anchors=args.num_anchors, max_length=args.max_length, device=args.device,
    )  # fmt: skip
    print_evaluations(results, Console(width=None if sys.stdout.isatty() else 160))
    return 0


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be whole numbers separated by commas, such as 1,4,16"
        ) from error
