"""The commands of docs/train_your_own.md do what the page says: a tiny target, the same flags, in the same order."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from byte_tokenizers import END_OF_TURN_ID
from safetensors.torch import load_file, save_file
from training_cases import save_target

from dspark.cli import build_parser, main

PAGE = Path(__file__).parents[1] / "docs" / "train_your_own.md"
# The last of equal flags wins, so these replace the page's model and sizes.
TINY = {
    "regenerate": "--model {target} --self-prompt 24 --max-tokens 24 --max-model-len 256 --max-user-tokens 64",
    "train": "--target {target} --draft-vocab-size 100 --num-taps 2 --markov-rank 8 --block-size 3 --num-anchors 4 "
    "--batch-size 4 --hold-out-fraction 0.4",
    "evaluate": "--target {target} --held-out 0.4 --num-anchors 4",
    "bench": "--model {target} --num-prompts 2 --max-tokens 8 --repeats 1 --max-model-len 512",
    "serve": "--model {target} --port 0 --max-model-len 256",
    "export": "--target {target}",
}


def commands(*, on_gpus: bool) -> list[str]:
    """Return the commands of the page, those for eight GPUs or the others."""
    text = PAGE.read_text(encoding="utf-8")
    laptop, gpus = text.split("\n## On 8 GPUs\n")
    blocks = re.findall(r"^```console\n(.*?)^```$", gpus if on_gpus else laptop, re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).splitlines()
    assert all(line.startswith("$ ") for line in lines), lines
    return [line.removeprefix("$ ") for line in lines]


def laptop_command(verb: str, target: Path) -> list[str]:
    """Return the arguments of the page's `dspark VERB`, with the tiny target and sizes."""
    (command,) = (words for words in map(shlex.split, commands(on_gpus=False)) if words[:2] == ["dspark", verb])
    return command[1:] + TINY[verb].format(target=target).split()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A tiny target that ends its turns often enough: the head's row of that token is long."""
    folder = save_target(tmp_path / "target")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][END_OF_TURN_ID] *= 3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@contextmanager
def served(argv: list[str]) -> Iterator[str]:
    """Run the server as its own process and yield its URL; SIGTERM must end it well."""
    process = subprocess.Popen([sys.executable, "-m", "dspark.cli", *argv], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        greeting = process.stdout.readline()
        found = re.search(r"is served at (http://\S+)\. ", greeting)
        assert found, greeting
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()


def test_the_page_has_these_commands_and_no_others() -> None:
    words = [shlex.split(command) for command in commands(on_gpus=False)]
    assert [" ".join(w[:2]) if w[0] == "dspark" else w[0] for w in words] == [
        *("dspark regenerate", "dspark train", "dspark evaluate", "dspark bench", "dspark serve", "curl"),
        "dspark export",
    ]


def test_the_page_leads_from_nothing_to_a_served_and_exported_drafter(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(laptop_command("regenerate", target)) == 0
    assert capsys.readouterr().out == "answers.jsonl\n"
    records = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert {record["temperature"] for record in records} == {0.0, 0.6, 1.0}
    assert Path("answers.run.json").exists()

    assert main(laptop_command("train", target)) == 0
    assert capsys.readouterr().out == "run/step-00000100\n"
    assert len(Path("run/log.jsonl").read_text().splitlines()) >= 100
    assert any(Path("features").iterdir())

    assert main(laptop_command("evaluate", target)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])

    assert main(laptop_command("bench", target)) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(run["drafter"], run["identical_to_plain"]) for run in report["runs"]] == [
        ("none", 1.0),
        ("ngram", 1.0),
        ("run/step-00000100", 1.0),
    ]

    assert main(laptop_command("export", target)) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{tmp_path.resolve() / 'my-drafter'}\n")
    assert load_file("my-drafter/model.safetensors")["lm_head.weight"].shape == (264, 32)

    (curl,) = (shlex.split(line) for line in commands(on_gpus=False) if line.startswith("curl "))
    body = json.loads(curl[curl.index("-d") + 1]) | {"model": "target"}
    with served(laptop_command("serve", target)) as url:
        address = curl[1].replace("http://127.0.0.1:8000", url)
        request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
    question = body["messages"][0]["content"]
    plain = ["generate", "--chat", question, "--max-tokens", str(body["max_tokens"]), "--drafter", "none"]
    assert main([*plain, "--model", str(target), "--max-model-len", "256"]) == 0
    assert capsys.readouterr().out == f"{answer}\n"


def test_the_commands_for_many_gpus_are_understood() -> None:
    """They are not run here; tests/training/test_trainer.py runs two processes."""
    split, loop, torchrun, *rest = commands(on_gpus=True)
    assert split.startswith("split ")
    assert torchrun.startswith("torchrun --nproc-per-node 8 -m dspark.cli train ")
    calls = [re.findall(r"dspark (regenerate [^&;]+)&", loop), [torchrun.split(" -m dspark.cli ")[1]]]
    calls.append([line.removeprefix("dspark ") for line in rest])
    verbs = []
    for call in (call for group in calls for call in group):
        build_parser().parse_args(shlex.split(call.replace("$i", "0")))
        verbs.append(call.split()[0])
    assert verbs == ["regenerate", "train", "evaluate", "export"]
