"""`dspark calibrate` on a tiny target: the file, the table and the plot, and that the file is then used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from drafter_cases import make_config, make_tensors
from training_cases import CPU, save_target, write_conversations, write_records

from dspark.cli import main
from dspark.models.drafter_calibration import load_confidence_head
from dspark.models.drafter_checkpoint import save_drafter
from dspark.models.weights import load_decoder

CONFIG = make_config(
    hidden_size=32, target_hidden_size=32, vocab_size=264, draft_vocab_size=264, num_target_layers=4, block_size=3
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(tmp_path_factory.mktemp("calibrate") / "target"))


@pytest.fixture(scope="module")
def data(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    decoder = load_decoder(Path(target), dtype=torch.float32, device=CPU)
    return str(write_conversations(tmp_path_factory.mktemp("calibrate") / "answers.jsonl", decoder, 4))


@pytest.fixture(scope="module")
def many(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Enough texts to refit a head to."""
    decoder = load_decoder(Path(target), dtype=torch.float32, device=CPU)
    return str(write_conversations(tmp_path_factory.mktemp("calibrate") / "many.jsonl", decoder, 12))


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    save_drafter(tmp_path / "drafter", CONFIG, make_tensors(CONFIG), layout="deepspec")
    return tmp_path / "drafter"


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(list(argv))
    return status, *capsys.readouterr()


def test_the_file_is_written_beside_the_drafter_and_used_from_then_on(
    target: str, data: str, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate = ["evaluate", str(drafter), data, "--target", target, "--num-sequences", "2", "--num-round-texts", "0"]
    _, before, _ = run(capsys, *evaluate)
    plot = tmp_path / "plot.svg"
    status, out, _ = run(capsys, "calibrate", str(drafter), data, "--target", target, "--plot", str(plot))
    assert (status, out.splitlines()[-1]) == (0, str(drafter / "sts.json"))
    assert "ECE before" in out
    assert "rounds are few" in out
    content = json.loads((drafter / "sts.json").read_text())
    assert len(content["temperatures"]) == len(content["ece_before"]) == len(content["ece_after"]) == 3
    assert content["dataset"] == "answers.jsonl"
    assert content["num_samples"] > 0
    assert {"command", "seed", "machine"} <= content.keys()
    assert "position 3: ECE" in plot.read_text()
    _, after, _ = run(capsys, *evaluate)
    assert "ECE raw" in before and "ECE calibrated" in after
    results = [json.loads(text.splitlines()[-1])["files"][data] for text in (before, after)]
    assert [result["is_calibrated"] for result in results] == [False, True]
    assert results[0]["reliability"] != results[1]["reliability"]
    assert list(drafter.glob(".*")) == []


def test_a_refitted_head_is_stored_in_the_drafter_with_its_temperatures(
    target: str, many: str, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (drafter / "sts.json").write_text("of the old head")
    before = load_confidence_head(drafter)
    plot = tmp_path / "plot.svg"
    flags = ["--target", target, "--plot", str(plot), "--refit-head"]
    status, out, _ = run(capsys, "calibrate", str(drafter), many, *flags)
    assert (status, out.splitlines()[-1]) == (0, str(drafter / "sts.json"))
    assert "refitted head" in out
    assert "refitted head" in plot.read_text()
    content = json.loads((drafter / "sts.json").read_text())
    assert len(content["temperatures"]) == len(content["ece_refitted"]) == 3
    record = content["refitted_head"]
    after = load_confidence_head(drafter)
    assert record.keys() == {"scale", "offset", "penalty"}
    if record["penalty"] is None:
        assert after.weights == pytest.approx(record["scale"] * before.weights)
    assert (after.bias, after.weights[0]) != (before.bias, before.weights[0])


def test_an_interruption_leaves_the_new_head_without_temperatures_of_the_old(
    target: str, many: str, drafter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    (drafter / "sts.json").write_text("of the old head")
    monkeypatch.setattr("dspark.training.calibrate.write_calibration", interrupted)
    status, _, _ = run(capsys, "calibrate", str(drafter), many, "--target", target, "--refit-head")
    assert status == 130
    assert not (drafter / "sts.json").exists()
    assert load_confidence_head(drafter).bias != pytest.approx(float(make_tensors(CONFIG)["confidence_head.proj.bias"]))


def test_the_file_can_stand_elsewhere_and_says_the_same_again(
    target: str, data: str, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drafter's own, broken file is neither read nor touched."""
    (drafter / "sts.json").write_text("broken")
    contents = []
    for name in ("a.json", "b.json"):
        output = tmp_path / name
        flags = ["--target", target, "--output", str(output), "--temperatures", "0", "--num-sequences", "3"]
        status, out, _ = run(capsys, "calibrate", str(drafter), data, *flags)
        assert (status, out.splitlines()[-1]) == (0, str(output))
        contents.append(json.loads(output.read_text()) | {"command": None})
    assert contents[0] == contents[1]
    assert (drafter / "sts.json").read_text() == "broken"


def test_ctrl_c_leaves_the_old_file(
    target: str, data: str, drafter: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    (drafter / "sts.json").write_text("old")
    monkeypatch.setattr("dspark.training.calibrate.collect_rounds", interrupted)
    status, out, error = run(capsys, "calibrate", str(drafter), data, "--target", target)
    assert (status, out, error) == (130, "", "dspark: interrupted\n")
    assert (drafter / "sts.json").read_text() == "old"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["absent", "DATA"], "the drafter (absent) is not a folder"),
        (["DRAFTER", "PROMPTS"], "line 1 has the keys prompt and no answer"),
        (["DRAFTER", "DATA", "--output", "absent/sts.json"], "--output (absent/sts.json) is a folder or in none"),
        (["DRAFTER", "DATA", "--refit-head", "--output", "a.json"], "--output (a.json) does not go with --refit-head"),
        (["DRAFTER", "DATA", "--plot", "a.pdf"], "a.pdf must end in .svg or .png"),
        (["DRAFTER", "DATA", "--max-length", "0"], "--max-length (0) must be at least 1"),
        (["DRAFTER", "DATA", "--temperatures", "0.7"], "temperatures (0.7) must be 0, 1 or both"),
    ],
)
def test_a_users_mistake_is_said_before_anything_is_measured(
    argv: list[str], message: str, data: str, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_records(tmp_path / "prompts.jsonl", [{"prompt": "hello"}])
    names = {"DRAFTER": str(drafter), "DATA": data, "PROMPTS": str(prompts)}
    status, _, error = run(capsys, "calibrate", *(names.get(part, part) for part in argv))
    assert status == 2
    assert message in error
