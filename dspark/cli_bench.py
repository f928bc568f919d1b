"""The verb `dspark bench`: drafters side by side, or what happens when the load jumps."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from dspark.cli_engine import add_engine_flags, engine_config
from dspark.errors import DsparkError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from dspark.evaluation.prompts import PromptRecord

BENCH_TEXT = (
    "Measure drafters against plain decoding, interleaved in one run; a table, then one JSON line, which dspark plot "
    "draws. With --jump measure what happens when the load jumps, with --serving what HTTP costs on top of the engine."
)
CONCURRENCY = "1,4,16"
BUILT_IN_PROMPTS = 16  # used of a built-in set unless --num-prompts says otherwise
SERVING_CONCURRENCY = 16
# Flags that say nothing about a jump, or about serving.
_NOT_OF_A_JUMP = {"concurrency": None, "seed": None, "compare_transformers": False}
_NOT_OF_SERVING = {"jump": None, "temperature": "0", "seed": None, "compare_transformers": False}


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `dspark bench`."""
    parser.add_argument(
        "--drafters", default="none,auto",
        help="comma-separated, as for serve --drafter; DRAFTER@LENGTH drafts and verifies so many tokens in every "
        "round (--scheduler fixed)",
    )  # fmt: skip
    parser.add_argument("--concurrency", help=f"comma-separated numbers of requests at a time (None: {CONCURRENCY})")
    parser.add_argument(
        "--jump", type=_jump, metavar="N:M",
        help="serve N requests at a time, then M from one step to the next, and measure the steps around that",
    )  # fmt: skip
    parser.add_argument(
        "--serving", action="store_true",
        help="measure a server process against the engine in this one: throughput at one --concurrency (None: "
        f"{SERVING_CONCURRENCY}), and time to first byte at one stream",
    )  # fmt: skip
    parser.add_argument(
        "--prompts", metavar="SET", default="mixed",
        help="mixed, repetitive, hostile (built in), or a file of JSON lines with the key prompt or turns",
    )  # fmt: skip
    parser.add_argument(
        "--num-prompts",
        help="prompts of a pass, the first ones: one number, and more only for more requests at a time, or one for "
        f"each --concurrency (None: {BUILT_IN_PROMPTS} of a built-in set, all of a file or with --jump)",
    )  # fmt: skip
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per answer at most")
    parser.add_argument("--temperature", default="0", help="comma-separated, each is measured; 0 is greedy")
    parser.add_argument("--seed", type=int, help="request i gets seed + i, so that sampled text can be compared")
    parser.add_argument("--repeats", type=int, default=3, help="passes over the prompts, or jumps, after the warm-up")
    parser.add_argument("--compare-transformers", action="store_true", help="measure transformers.generate as well")
    add_engine_flags(parser, with_drafter=False)


def run_bench_verb(args: argparse.Namespace) -> int:
    """Measure as the flags say; print a table and the JSON line."""
    from rich.console import Console

    from dspark.evaluation.prompts import load_prompts

    settings = {
        "drafters": tuple(name.strip() for name in args.drafters.split(",")),
        "temperatures": _numbers("--temperature", args.temperature, float, "0,1"),
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
    }
    prompts = load_prompts(args.prompts)
    status, console = Console(stderr=True), Console(width=None if sys.stdout.isatty() else 200)

    def progress(line: str) -> None:
        status.print(line, highlight=False)

    run = _run_serving if args.serving else _run_bench if args.jump is None else _run_jump
    run(args, settings, prompts, progress, console)
    return 0


def _run_bench(
    args: argparse.Namespace,
    settings: dict[str, Any],
    prompts: list[PromptRecord],
    progress: Callable[[str], None],
    console: Console,
) -> None:
    from dspark.evaluation.bench_offline import BenchConfig, run_bench
    from dspark.evaluation.bench_report import print_report
    from dspark.evaluation.prompts import BUILT_IN

    num_prompts = _num_prompts(args)
    if num_prompts is None and args.prompts in BUILT_IN:
        num_prompts = (BUILT_IN_PROMPTS,)
    bench = BenchConfig(
        **settings,
        concurrency=_numbers("--concurrency", args.concurrency or CONCURRENCY, int, CONCURRENCY),
        num_prompts=num_prompts,
        seed=args.seed,
        compare_transformers=args.compare_transformers,
    )
    report = run_bench(engine_config(args), bench, prompts, progress=progress)
    print_report(report | {"command": ["dspark", *sys.argv[1:]]}, console)


def _run_jump(
    args: argparse.Namespace,
    settings: dict[str, Any],
    prompts: list[PromptRecord],
    progress: Callable[[str], None],
    console: Console,
) -> None:
    _refuse(args, _NOT_OF_A_JUMP, "--jump")

    from dspark.evaluation.load_jump import JumpConfig, print_jumps, run_jump

    num_prompts = _only("--num-prompts", _num_prompts(args) or (len(prompts),), "--jump")
    before, after = args.jump
    jump = JumpConfig(**settings, before=before, after=after)
    report = run_jump(engine_config(args), jump, prompts[:num_prompts], progress=progress)
    print_jumps(report | {"command": ["dspark", *sys.argv[1:]]}, console)


def _run_serving(
    args: argparse.Namespace,
    settings: dict[str, Any],
    prompts: list[PromptRecord],
    progress: Callable[[str], None],
    console: Console,
) -> None:
    _refuse(args, _NOT_OF_SERVING, "--serving")

    from dspark.evaluation.bench_serving import ServingBenchConfig, print_serving, run_bench_serving

    concurrency = _numbers("--concurrency", args.concurrency or str(SERVING_CONCURRENCY), int, "16")
    settings.pop("temperatures")
    bench = ServingBenchConfig(
        **settings,
        concurrency=_only("--concurrency", concurrency, "--serving"),
        num_prompts=_only("--num-prompts", _num_prompts(args) or (len(prompts),), "--serving"),
    )
    report = run_bench_serving(engine_config(args), bench, prompts, progress=progress)
    print_serving(report | {"command": ["dspark", *sys.argv[1:]]}, console)


def _only(flag: str, numbers: tuple[int, ...], mode: str) -> int:
    """Return the one number of a flag. Raises `DsparkError` where there are more."""
    if len(numbers) > 1:
        raise DsparkError(f"{flag} ({','.join(map(str, numbers))}) must be one number with {mode}")
    return numbers[0]


def _refuse(args: argparse.Namespace, defaults: dict[str, Any], mode: str) -> None:
    """Raise `DsparkError` for a flag that says nothing in this mode."""
    for name, default in defaults.items():
        if getattr(args, name) != default:
            raise DsparkError(
                f"--{name.replace('_', '-')} ({getattr(args, name)}) does not go with {mode}; leave it out"
            )


def _num_prompts(args: argparse.Namespace) -> tuple[int, ...] | None:
    if args.num_prompts is None:
        return None
    numbers = _numbers("--num-prompts", args.num_prompts, int, "16 or 8,16,48")
    if min(numbers) < 1:
        raise DsparkError(f"--num-prompts ({args.num_prompts}) must be at least 1")
    return numbers


def _numbers(flag: str, text: str, kind: type, example: str) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        whole = "whole " if kind is int else ""
        raise DsparkError(f"{flag} ({text}) must be {whole}numbers separated by commas, such as {example}") from error


def _jump(text: str) -> tuple[int, int]:
    before, after = text.split(":")
    return int(before), int(after)


_jump.__name__ = "N:M"  # argparse says "invalid ... value"
