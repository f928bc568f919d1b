"""`dspark evaluate --served` and `dspark plot` on a tiny target; offline evaluation has its tests in its room."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from training_cases import CPU, answer, save_target, write_records

from dspark.cli import main
from dspark.models.weights import load_decoder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(tmp_path_factory.mktemp("cli") / "target"))


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    """Two tasks, of two prompts and one."""
    write_records(tmp_path / "chat.jsonl", [{"turns": ["hello", "again"]}, {"turns": ["what is it?"]}])
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_records(tmp_path / "more.jsonl", [{"messages": messages}])
    return [str(tmp_path / name) for name in ("chat.jsonl", "more.jsonl")]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(list(argv))
    return status, *capsys.readouterr()


def test_prompts_are_answered_and_counted_by_task_and_temperature(
    target: str, prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target drafts for itself: greedily every draft is right, and none is cut for want of room."""
    plot = tmp_path / "plot.svg"
    flags = f"--target {target} --served --max-tokens 8 --num-draft-tokens 3 --concurrency 2 --plot {plot}"
    status, out, _ = run(capsys, "evaluate", target, *prompts, *flags.split())
    assert status == 0
    assert "served acceptance" in out
    result = json.loads(out.splitlines()[-1])
    assert (result["kind"], result["settings"]["num_draft_tokens"]) == ("served", 3)
    assert result["temperatures"].keys() == {"0", "1"}
    greedy = result["temperatures"]["0"]
    assert {name: one["num_texts"] for name, one in greedy["tasks"].items()} == {prompts[0]: 2, prompts[1]: 1}
    assert greedy["all"]["conditional_acceptance"] == [1, 1, 1]
    for measured in result["temperatures"].values():
        assert measured["all"]["num_drafted"] == measured["all"]["num_verified"] > 0
        assert sum(measured["all"]["finish_reasons"].values()) == 3
    assert "accepted, given all before it" in plot.read_text()


def test_no_draft_is_cut_for_want_of_room_whatever_the_concurrency(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """60 requests of 8 rows each are more than a pass holds by default (256 tokens)."""
    path = write_records(tmp_path / "many.jsonl", [{"prompt_ids": [n, 200 - n, 7]} for n in range(60)])
    flags = f"--target {target} --served --max-tokens 10 --temperatures 0 --concurrency 60 --num-draft-tokens 7"
    _, out, _ = run(capsys, "evaluate", target, str(path), *flags.split())
    measured = json.loads(out.splitlines()[-1])["temperatures"]["0"]["all"]
    assert measured["num_drafted"] == measured["num_verified"] > 60 * 5


def test_plain_decoding_is_measured_too_and_temperatures_can_be_chosen(
    target: str, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--target {target} --served --max-tokens 4 --num-prompts 1 --temperatures 0.6"
    status, out, _ = run(capsys, "evaluate", "none", *prompts, *flags.split())
    assert status == 0
    (measured,) = json.loads(out.splitlines()[-1])["temperatures"].values()
    assert measured["all"]["accepted_length"] == 1
    assert measured["all"]["num_texts"] == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["DRAFTER", "PROMPTS"], "line 1 has the keys turns and no answer, nor has any other line; add --served"),
        (["DRAFTER", "PROMPTS", "--max-tokens", "4"], "--max-tokens (4) needs --served; add it"),
        (["DRAFTER", "PROMPTS", "--served", "--num-anchors", "4"], "--num-anchors (4) is of offline evaluation"),
        (["ngram", "PROMPTS"], "the drafter (ngram) is not a folder, which offline evaluation needs"),
        (["DRAFTER", "PROMPTS", "--served", "--max-tokens", "0"], "max_tokens (0) must be at least 1"),
        (["DRAFTER", "PROMPTS", "--num-round-texts", "-1"], "--num-round-texts (-1) must be at least 0"),
        (["DRAFTER", "PROMPTS", "--plot", "a.pdf"], "a.pdf must end in .svg or .png"),
        (["DRAFTER", "absent.jsonl", "--served"], "cannot read the prompt file absent.jsonl"),
    ],
)
def test_a_users_mistake_is_said_before_anything_is_measured(
    target: str, prompts: list[str], argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [{"DRAFTER": target, "PROMPTS": prompts[0]}.get(part, part) for part in argv]
    status, _, error = run(capsys, "evaluate", *argv, "--target", target)
    assert status == 2
    assert message in error


def test_records_with_answers_can_be_served_as_prompts(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The greedy answer in the data is what the engine says; its length is that of the texts counted."""
    decoder = load_decoder(Path(target), dtype=torch.float32, device=CPU)
    ids = answer(decoder, [1, 2, 3], 6)
    path = write_records(tmp_path / "data.jsonl", [{"prompt_ids": [1, 2, 3], "response_ids": ids}])
    flags = f"--target {target} --served --max-tokens 6 --temperatures 0"
    status, out, _ = run(capsys, "evaluate", "ngram", str(path), *flags.split())
    assert status == 0
    assert json.loads(out.splitlines()[-1])["temperatures"]["0"]["all"]["num_emitted"] == 5


@pytest.fixture
def saved(target: str, prompts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Results of two drafters."""
    paths = []
    for drafter in ("none", "ngram"):
        flags = f"--target {target} --served --max-tokens 6 --temperatures 0"
        _, out, _ = run(capsys, "evaluate", drafter, *prompts, *flags.split())
        paths.append(str(write_text(tmp_path / f"{drafter}.txt", out)))
    return paths


def write_text(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_saved_results_are_drawn_side_by_side(
    saved: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "compare.svg"
    status, out, _ = run(capsys, "plot", f"plain={saved[0]}", saved[1], "--output", str(plot))
    assert (status, out.strip()) == (0, str(plot))
    assert "plain, T=0" in plot.read_text()
    assert "ngram, T=0" in plot.read_text()
    assert str(tmp_path) not in plot.read_text()


def test_two_results_of_one_name_are_refused(
    saved: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = run(capsys, "plot", saved[0], saved[0], "--output", str(tmp_path / "compare.svg"))
    assert status == 2
    assert "two results are called 'none'; name them" in error
