"""The command line: `dspark VERB`, from `serve` to `plot`. A verb imports its room itself."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark import __version__
from dspark.cli_bench import BENCH_TEXT, add_bench_flags, run_bench_verb
from dspark.cli_engine import add_chat_flags, add_engine_flags, engine_config
from dspark.cli_evaluation import (
    CALIBRATE_TEXT,
    EVALUATE_TEXT,
    PLOT_TEXT,
    add_calibrate_flags,
    add_evaluate_flags,
    add_plot_flags,
    run_calibrate,
    run_evaluate,
    run_plot,
)
from dspark.cli_profile import PROFILE_TEXT, add_profile_flags, run_profile
from dspark.cli_traffic import LOAD_TEXT, SOAK_TEXT, add_load_flags, add_soak_flags, run_load_verb, run_soak_verb
from dspark.cli_training import (
    EXPORT_TEXT,
    REGENERATE_TEXT,
    TRAIN_TEXT,
    add_export_flags,
    add_regenerate_flags,
    add_train_flags,
    run_export,
    run_regenerate,
    run_train,
)
from dspark.config import DEFAULT_MODEL, EngineConfig
from dspark.errors import DsparkError

if TYPE_CHECKING:
    from dspark.engine.build import ReadyEngine

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None, *, run: Callable[[argparse.Namespace], int] | None = None) -> int:
    """Run one verb and return the exit status: 0, 2 for a user's mistake, 130 after Ctrl-C.

    `run` takes the parsed flags in place of the verb's own function.
    """
    args = build_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        return (run or args.run)(args)
    except DsparkError as error:
        print(f"dspark: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains once more at exit
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("dspark: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with all verbs."""
    parser = argparse.ArgumentParser(
        prog="dspark", description="Large language models answer faster without changing what they say."
    )
    parser.add_argument("--version", action="version", version=f"dspark {__version__}")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    own_verbs = (_add_serve, _add_generate, _add_bench, _add_profile, _add_fetch)
    for add_verb in (
        *own_verbs,
        _add_load,
        _add_soak,
        _add_regenerate,
        _add_train,
        _add_evaluate,
        _add_calibrate,
        _add_plot,
        _add_export,
    ):
        add_verb(verbs)
    return parser


def _add_verb(verbs: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--log-level", default="info" if name == "serve" else "warning", choices=("debug", "info", "warning", "error"),
        help="least severity that is logged",
    )  # fmt: skip
    return parser


def _add_serve(verbs: Any) -> None:
    parser = _add_verb(verbs, "serve", _serve, "Serve a model over an OpenAI-compatible HTTP API.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    parser.add_argument(
        "--shutdown-timeout", type=_seconds, default=30.0, metavar="SECONDS", help="time running requests get to finish"
    )
    parser.add_argument(
        "--admin-key", type=_key, metavar="KEY", default=None,
        help="opens /admin/speculation to those who send it; @FILE reads it from a file",
    )  # fmt: skip
    add_chat_flags(parser)
    add_engine_flags(parser)


def _add_generate(verbs: Any) -> None:
    parser = _add_verb(verbs, "generate", _generate, "Continue prompts, and say how fast and how well drafted.")
    parser.add_argument("prompt", nargs="*", help="prompts; none, and no --prompts: read one from standard input")
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines with the key prompt or turns")
    parser.add_argument("--chat", action="store_true", help="treat each prompt as a user's turn in a chat")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per answer at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus mass; 1 is off")
    parser.add_argument("--top-k", type=int, default=0, help="most likely tokens kept; 0 is off")
    parser.add_argument("--min-p", type=float, default=0.0, help="least probability relative to the best; 0 is off")
    parser.add_argument("--seed", type=int, help="reproduce exactly, whatever the drafter")
    parser.add_argument("--stop", action="append", default=[], help="end at this text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-sequence token")
    add_engine_flags(parser)


def _add_bench(verbs: Any) -> None:
    add_bench_flags(_add_verb(verbs, "bench", run_bench_verb, BENCH_TEXT))


def _add_profile(verbs: Any) -> None:
    add_profile_flags(_add_verb(verbs, "profile", run_profile, PROFILE_TEXT))


def _add_fetch(verbs: Any) -> None:
    parser = _add_verb(verbs, "fetch", _fetch, "Download and convert a model ahead of its first use; print its folder.")
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="as for serve --model")


def _add_load(verbs: Any) -> None:
    add_load_flags(_add_verb(verbs, "load", run_load_verb, LOAD_TEXT))


def _add_soak(verbs: Any) -> None:
    add_soak_flags(_add_verb(verbs, "soak", run_soak_verb, SOAK_TEXT))


def _add_regenerate(verbs: Any) -> None:
    parser = _add_verb(verbs, "regenerate", _regenerate, REGENERATE_TEXT)
    add_regenerate_flags(parser)
    add_engine_flags(parser)


def _add_train(verbs: Any) -> None:
    add_train_flags(_add_verb(verbs, "train", _train, TRAIN_TEXT))


def _add_evaluate(verbs: Any) -> None:
    add_evaluate_flags(_add_verb(verbs, "evaluate", run_evaluate, EVALUATE_TEXT))


def _add_calibrate(verbs: Any) -> None:
    add_calibrate_flags(_add_verb(verbs, "calibrate", run_calibrate, CALIBRATE_TEXT))


def _add_plot(verbs: Any) -> None:
    add_plot_flags(_add_verb(verbs, "plot", run_plot, PLOT_TEXT))


def _add_export(verbs: Any) -> None:
    add_export_flags(_add_verb(verbs, "export", run_export, EXPORT_TEXT))


def _serve(args: argparse.Namespace) -> int:
    from dspark.engine.build import load_ready_engine

    return serve(args, load_ready_engine)


def serve(args: argparse.Namespace, load_engine: Callable[[EngineConfig], ReadyEngine]) -> int:
    """Serve as the flags of `dspark serve` say what `load_engine` makes of their settings."""
    from dspark.serving.server import run_server

    config = engine_config(args)
    model_name = ""

    def load() -> ReadyEngine:
        nonlocal model_name
        ready = load_engine(config)
        model_name = ready.engine.model_name
        return ready

    run_server(
        load,
        host=args.host,
        port=args.port,
        shutdown_timeout_s=args.shutdown_timeout,
        admin_key=args.admin_key,
        chat=config.chat,
        on_ready=lambda url: print(_greeting(url, model_name), flush=True),
    )
    return 0


def _greeting(url: str, model_name: str) -> str:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    body = json.dumps({"model": model_name, "messages": messages, "temperature": 0, "max_tokens": 64})
    return f"""\
{model_name} is served at {url}. Try it from another terminal:

curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'
"""


def _generate(args: argparse.Namespace) -> int:
    from dspark.engine.build import load_engine
    from dspark.engine.llm import LLM
    from dspark.evaluation.prompts import PromptRecord, load_prompts
    from dspark.request import SamplingParams

    sampling = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p, seed=args.seed,
        stop=tuple(args.stop), ignore_eos=args.ignore_eos, max_tokens=args.max_tokens,
    )  # fmt: skip
    config = engine_config(args)
    records = load_prompts(args.prompts) if args.prompts else []
    texts = args.prompt or ([] if records else [_prompt_from_stdin()])
    records += [PromptRecord(turns=(text,)) if args.chat else PromptRecord(prompt=text) for text in texts]
    llm = LLM.from_engine(load_engine(config))
    prompts = [record.token_ids(llm.tokenizer) for record in records]
    completions = llm.generate(prompts, sampling, show_progress=sys.stderr.isatty())
    for completion in completions:
        print(completion.text)
        if completion.error is not None:
            print(f"dspark: error: {completion.error}", file=sys.stderr)
    _print_speed(completions)
    return int(any(completion.error is not None for completion in completions))


def _prompt_from_stdin() -> str:
    if sys.stdin is None:
        raise DsparkError("there is no prompt and standard input is closed; give a prompt or --prompts")
    return sys.stdin.read()


def _print_speed(completions: Sequence[Any]) -> None:
    from dspark.request import SpeculationStats

    stats = SpeculationStats()
    for completion in completions:
        stats = stats.plus(completion.speculation)
    num_tokens = sum(len(c.token_ids) for c in completions)
    seconds = max(c.latency_s for c in completions)
    accepted_length = f"{stats.accepted_length:.2f}" if stats.num_rounds else "-"
    print(
        f"[{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s, accepted length {accepted_length}, "
        f"{stats.num_accepted} of {stats.num_verified} drafted tokens accepted]",
        file=sys.stderr,
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _key(text: str) -> str:
    if not text.startswith("@"):
        key = text
    else:
        try:
            key = Path(text[1:]).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"cannot read {text[1:]}: {error}") from error
    if not key:
        raise argparse.ArgumentTypeError("the key is empty; give at least one character")
    return key


_seconds.__name__ = "number of seconds"  # argparse says "invalid ... value"


def _fetch(args: argparse.Namespace) -> int:
    from dspark.models.model_source import resolve_model

    print(resolve_model(args.model).path)
    return 0


def _regenerate(args: argparse.Namespace) -> int:
    result = run_regenerate(args, engine_config(args))
    return EXIT_INTERRUPTED if result.is_interrupted else int(result.num_failed > 0)


def _train(args: argparse.Namespace) -> int:
    return EXIT_INTERRUPTED if run_train(args).is_interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
