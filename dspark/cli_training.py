"""The verbs that make a drafter, `dspark regenerate | train | export`: their flags, and what they print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.config import DRAFTER_LAYOUTS, EngineConfig

if TYPE_CHECKING:
    from dspark.training.regenerate import RegenerateResult
    from dspark.training.trainer import TrainResult

REGENERATE_TEXT = (
    "Let a model write the data its drafter is trained on: it answers prompts (JSON lines with prompt, turns, messages "
    "or prompt_ids), or user turns that it writes itself (--self-prompt). Token ids are kept exactly. Ctrl-C keeps "
    "what is finished, and the same command goes on; neither that nor the batch changes an answer, near-ties aside."
)
EXPORT_TEXT = (
    "Write a drafter for other engines, with what its files leave to the target filled in, and say how to serve it."
)
TRAIN_TEXT = (
    "Train a drafter on conversations that the target wrote. Data: JSON lines with prompt_ids and response_ids, or "
    "with messages (and tools) for the target's chat template. The step-N folders in the output are drafters; "
    "log.jsonl and run.json tell the story. Ctrl-C ends after the step at hand, with a checkpoint. On several GPUs: "
    "torchrun --nproc-per-node 8 -m dspark.cli train ... --device cuda."
)


def add_regenerate_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting of `RegenerateConfig`."""
    from dspark.training.regenerate_config import RegenerateConfig

    _add_setting_flags(parser, RegenerateConfig, files="prompts", nargs="*")


def run_regenerate(args: argparse.Namespace, engine_config: EngineConfig) -> RegenerateResult:
    """Answer prompts as the flags say, with our engine, and print the file of the answers."""
    from dspark.engine.build import load_engine
    from dspark.models.model_source import resolve_model
    from dspark.training.regenerate import regenerate
    from dspark.training.regenerate_config import RegenerateConfig

    settings = {setting.name: getattr(args, setting.name) for setting in fields(RegenerateConfig)}
    config = RegenerateConfig(**settings | {"prompts": tuple(args.prompts)})
    engine = load_engine(engine_config)
    folder = resolve_model(engine_config.model).path
    result = regenerate(config, engine, folder, facts={"engine": asdict(engine_config)})
    print(result.output)
    if result.is_interrupted:
        print("dspark: stopped; the same command goes on", file=sys.stderr)
    return result


def add_train_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting of `TrainConfig`."""
    from dspark.training.config import TrainConfig

    _add_setting_flags(parser, TrainConfig, files="data", nargs="+")


def _add_setting_flags(parser: argparse.ArgumentParser, settings: Any, *, files: str, nargs: str) -> None:
    """Add a flag for each field of a dataclass, with its type, default and meaning; `files` is positional."""
    for setting in fields(settings):
        flag, text, kind = f"--{setting.name.replace('_', '-')}", setting.metadata["help"], str(setting.type)
        if setting.name == files:
            parser.add_argument(files, nargs=nargs, metavar="FILE", help=text)
        elif kind == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=setting.default, help=text)
        elif setting.default is MISSING:
            parser.add_argument(flag, required=True, default=argparse.SUPPRESS, help=text)
        else:
            kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float}
            kinds |= {"tuple[int, ...]": _integers, "tuple[float, ...]": _numbers}
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


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `dspark export`."""
    layouts = [layout for layout in DRAFTER_LAYOUTS if layout != "auto"]
    parser.add_argument(
        "drafter", help="folder of the drafter, a step-N folder of a training run or any other; or hub id"
    )
    parser.add_argument("--layout", required=True, choices=layouts, default=argparse.SUPPRESS, help="of the files")
    parser.add_argument("--output", required=True, default=argparse.SUPPRESS, help="folder to make")
    parser.add_argument("--target", help="its model, as for serve --model; None: the one that the drafter names")
    parser.add_argument(
        "--dtype", default="keep", choices=("keep", "float32", "bfloat16", "float16"), help="of the stored weights"
    )
    parser.add_argument(
        "--expand-vocabulary", action="store_true",
        help="let a drafter of a pruned vocabulary propose all ids, with the target's head rows for those it lacks",
    )  # fmt: skip
    parser.add_argument(
        "--without-head", action="store_true",
        help="leave the head of a pruned vocabulary to the target: smaller files, which only dspark can serve",
    )  # fmt: skip
    parser.add_argument("--drafter-layout", default="auto", choices=DRAFTER_LAYOUTS, help="how the drafter is read")


def run_export(args: argparse.Namespace) -> int:
    """Write the drafter as the flags say, and print how other engines serve it."""
    from dspark.models.drafter_export import export_drafter

    export = export_drafter(
        args.drafter, Path(args.output), layout=args.layout, target=args.target, dtype=args.dtype,
        expand_vocabulary=args.expand_vocabulary, without_head=args.without_head, source_layout=args.drafter_layout,
    )  # fmt: skip
    if export.note is not None:
        print(f"dspark: note: {export.note}", file=sys.stderr)
    if args.without_head:
        print(export.folder)
    else:
        print(f"{export.folder}\n\nvLLM:\n{export.vllm_command}\n\nSGLang:\n{export.sglang_command}")
    return 0


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers separated by commas, such as 0,0.6,1.0") from error


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be whole numbers separated by commas, such as 1,4,16"
        ) from error
