"""Runs: resuming continues them, anything else is refused, processes share them, nothing leaves half a checkpoint."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from training_cases import read_log, save_target, settings, write_conversations

from dspark.errors import CheckpointError, ConfigError
from dspark.models.decoder import Decoder
from dspark.models.drafter import load_drafter
from dspark.training import checkpoint
from dspark.training.checkpoint import step_folders
from dspark.training.config import TrainConfig
from dspark.training.evaluate import evaluate
from dspark.training.interrupt import interrupt_flag
from dspark.training.trainer import train


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def optimizer_state(folder: Path) -> dict[int, dict[str, Tensor]]:
    state: dict[int, dict[str, Tensor]] = torch.load(folder / "training_state.pt", weights_only=True)["state"]
    return state


def assert_same_weights(first: Path, second: Path) -> None:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def command_of(config: TrainConfig, **more: Any) -> list[str]:
    values: dict[str, Any] = {
        "target": config.target, "output": config.output, "num_taps": 2, "markov_rank": 8, "block_size": 3,
        "num_anchors": 6, "batch_size": 4, "max_steps": config.max_steps, "hold_out_fraction": 0.0, "num_threads": 1,
    }  # fmt: skip
    flags = [text for name, value in (values | more).items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return ["-m", "dspark.cli", "train", *config.data, *flags]


@pytest.mark.parametrize("kind", ["online", "cached"])
def test_resuming_continues_bit_for_bit(target_folder: Path, data: Path, tmp_path: Path, kind: str) -> None:
    """Case M5."""
    cache = {} if kind == "online" else {"cache": str(tmp_path / "cache")}
    whole = settings(target_folder, data, tmp_path / "whole", max_steps=20, hold_out_fraction=0.2, **cache)
    train(whole, show_progress=False)
    halves = settings(
        target_folder, data, tmp_path / "halves", max_steps=20, hold_out_fraction=0.2, stop_at_step=10, **cache
    )
    assert train(halves, show_progress=False).step == 10
    rest = settings(target_folder, data, tmp_path / "halves", max_steps=20, hold_out_fraction=0.2, resume=True, **cache)
    assert train(rest, show_progress=False).step == 20
    first, second = (tmp_path / name / "step-00000020" for name in ("whole", "halves"))
    assert_same_weights(first, second)
    for key, moments in optimizer_state(first).items():
        assert all(torch.equal(value, optimizer_state(second)[key][name]) for name, value in moments.items())
    losses = [[line["loss"] for line in read_log(tmp_path / name) if "loss" in line] for name in ("whole", "halves")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 20


def test_the_same_seed_gives_the_same_drafter_and_another_one_does_not(
    target_folder: Path, data: Path, tmp_path: Path
) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(settings(target_folder, data, tmp_path / name, seed=seed), show_progress=False)
    a, b, c = (tmp_path / name / "step-00000004" for name in "abc")
    assert_same_weights(a, b)
    assert not torch.equal(weights(a)["fc.weight"], weights(c)["fc.weight"])


def test_a_repeated_step_leaves_one_line_in_the_log(target_folder: Path, data: Path, tmp_path: Path) -> None:
    train(settings(target_folder, data, tmp_path / "out", save_interval=2), show_progress=False)
    shutil.rmtree(tmp_path / "out" / "step-00000004")
    train(settings(target_folder, data, tmp_path / "out", save_interval=2, resume=True), show_progress=False)
    assert [line["step"] for line in read_log(tmp_path / "out")] == [1, 2, 3, 4]


CHANGES: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1},
    "tapped layers": {"tap_ids": (-1, 0)},
    "max_length": {"max_length": 100},
    "learning_rate": {"learning_rate": 1e-3},
    "batch_size": {"batch_size": 2},
    "loss_decay": {"loss_decay": 2.0},
    "cached features": {"cache": "cache"},
}


@pytest.fixture(scope="module")
def finished(target_folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished") / "out"
    train(settings(target_folder, data, output, stop_at_step=2), show_progress=False)
    return output


@pytest.mark.parametrize("name", CHANGES)
def test_resuming_with_another_setting_is_refused_by_name(
    target_folder: Path, data: Path, finished: Path, name: str
) -> None:
    """Case M5."""
    changed = settings(target_folder, data, finished, resume=True, **CHANGES[name])
    with pytest.raises(ConfigError, match=rf"made with other values of .*{name}.* then, .* now"):
        train(changed, show_progress=False)


@pytest.mark.parametrize(("name", "file"), [("chat template", "chat_template.jinja"), ("tokenizer", "tokenizer.json")])
def test_resuming_with_another_text_side_is_refused_by_name(
    target_folder: Path, data: Path, finished: Path, name: str, file: str
) -> None:
    """Case M5."""
    path = target_folder / file
    original = path.read_text()
    try:
        path.write_text(original + "\n")
        with pytest.raises(ConfigError, match=f"made with other values of {name} "):
            train(settings(target_folder, data, finished, resume=True), show_progress=False)
    finally:
        path.write_text(original)


def test_resuming_with_other_data_is_refused(
    target_folder: Path, decoder: Decoder, finished: Path, tmp_path: Path
) -> None:
    """Case M5."""
    other = write_conversations(tmp_path / "other.jsonl", decoder, 4)
    with pytest.raises(ConfigError, match="made with other values of data "):
        train(settings(target_folder, other, finished, resume=True), show_progress=False)


def test_resuming_with_another_target_is_refused(data: Path, finished: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "target")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    with pytest.raises(ConfigError, match="made with other values of target "):
        train(settings(other, data, finished, resume=True), show_progress=False)


def test_data_may_move(target_folder: Path, data: Path, finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(finished, output)
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(data.read_bytes())
    result = train(settings(target_folder, moved, output, resume=True, stop_at_step=3), show_progress=False)
    assert result.step == 3
    commands = json.loads((output / "run.json").read_text())["commands"]
    assert [command["first_step"] for command in commands] == [0, 2]


def test_a_run_is_not_overwritten(target_folder: Path, data: Path, finished: Path) -> None:
    with pytest.raises(ConfigError, match="holds a run with checkpoints up to step-00000002; resume it"):
        train(settings(target_folder, data, finished), show_progress=False)


def test_there_must_be_something_to_resume(target_folder: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no checkpoint to resume from"):
        train(settings(target_folder, data, tmp_path / "none", resume=True), show_progress=False)


def test_a_checkpoint_is_a_drafter_that_can_be_served(decoder: Decoder, finished: Path) -> None:
    drafter = load_drafter(finished / "step-00000002", decoder, tokenizer_size=262)
    assert drafter.config.num_draft_tokens == 3
    assert drafter.config.target_architecture == "LlamaForCausalLM"


def test_the_newest_checkpoints_stay(target_folder: Path, data: Path, tmp_path: Path) -> None:
    config = settings(target_folder, data, tmp_path / "out", save_interval=1, keep_checkpoints=2)
    train(config, show_progress=False)
    assert [folder.name for folder in step_folders(tmp_path / "out")] == ["step-00000003", "step-00000004"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "log.jsonl", "run.json", "step-00000003", "step-00000004",
    ]  # fmt: skip


def test_a_full_disk_leaves_the_old_checkpoint(
    target_folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    train(settings(target_folder, data, output, stop_at_step=2, keep_checkpoints=1), show_progress=False)
    before = weights(output / "step-00000002")

    def full(state: object, file: Any) -> None:
        file.write(b"part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(CheckpointError, match=r"step-00000004 cannot be written: .*No space left.*free space"):
        train(settings(target_folder, data, output, resume=True, keep_checkpoints=1), show_progress=False)
    assert [folder.name for folder in step_folders(output)] == ["step-00000002"]
    assert [path.name for path in output.iterdir() if path.name.startswith(".")] == []
    after = weights(output / "step-00000002")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_damaged_optimizer_state_is_named(target_folder: Path, data: Path, finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    shutil.copytree(finished, output)
    (output / "step-00000002" / "training_state.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"training_state\.pt is damaged"):
        train(settings(target_folder, data, output, resume=True), show_progress=False)


def test_the_run_record_says_what_made_the_drafter(finished: Path) -> None:
    record = json.loads((finished / "run.json").read_text())
    assert record["seed"] == 0
    assert record["settings"]["block_size"] == 3
    assert record["versions"]["torch"] == torch.__version__
    assert len(record["data_hash"]) == 64
    assert record["identity"]["tapped layers"] == "0,3"
    (command,) = record["commands"]
    assert command.keys() == {"argv", "git_sha", "first_step"}
    assert (record["num_conversations"], record["num_unanswered"]) == (8, 0)


def test_an_output_that_is_a_file_is_refused(target_folder: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ConfigError, match=r"out cannot be used as output: .*choose another folder"):
        train(settings(target_folder, data, tmp_path / "out"), show_progress=False)


def test_a_second_control_c_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored under a shell that runs the tests in the background
    with pytest.raises(KeyboardInterrupt), interrupt_flag() as interrupted:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupted.is_set()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_every_term_is_logged_on_its_own(target_folder: Path, decoder: Decoder, tmp_path: Path) -> None:
    """Case M7."""
    data = write_conversations(tmp_path / "many.jsonl", decoder, 12)
    config = settings(target_folder, data, tmp_path / "out", hold_out_fraction=0.4, eval_interval=2)
    train(config, show_progress=False)
    lines = read_log(tmp_path / "out")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in lines if "held_out" in line] == [2, 4]
    for line in steps:
        expected = 0.1 * line["ce"] + 0.9 * line["l1"] + 1.0 * line["confidence"]
        assert line["loss"] == pytest.approx(expected)
        assert len(line["acceptance"]) == 3
    assert {"blocks_per_s", "feature_tokens_per_s", "learning_rate", "grad_norm"} <= steps[0].keys()


def test_the_plain_parallel_baseline_is_rank_0(
    target_folder: Path, data: Path, decoder: Decoder, tmp_path: Path
) -> None:
    config = settings(target_folder, data, tmp_path / "out", markov_rank=0)
    result = train(config, show_progress=False)
    drafter = load_drafter(result.checkpoint, decoder, tokenizer_size=262)
    assert drafter.config.markov_rank == 0
    assert not drafter.config.confidence_uses_markov


BASELINE = {"architecture": "autoregressive", "num_layers": 1, "markov_rank": 0, "has_confidence_head": False}


def test_the_autoregressive_baseline_trains_resumes_and_is_measured(
    target_folder: Path, data: Path, tmp_path: Path
) -> None:
    changes = BASELINE | {"max_steps": 20, "draft_vocab_size": 200, "hold_out_fraction": 0.2}
    whole = train(settings(target_folder, data, tmp_path / "whole", **changes), show_progress=False)
    train(settings(target_folder, data, tmp_path / "halves", **changes, stop_at_step=10), show_progress=False)
    rest = train(settings(target_folder, data, tmp_path / "halves", **changes, resume=True), show_progress=False)
    assert_same_weights(whole.checkpoint, rest.checkpoint)
    lines = read_log(tmp_path / "whole")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert sum(losses[-5:]) < sum(losses[:5])
    (held_out,) = (line["held_out"] for line in lines if "held_out" in line)
    assert held_out["accepted_length"] > 1
    (measured,) = evaluate(whole.checkpoint, [str(data)], target=str(target_folder)).values()
    assert measured.num_blocks > 0


def test_the_autoregressive_baseline_has_one_layer_and_no_heads(
    target_folder: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"one layer and no heads, not num_layers 2, markov_rank 0, "):
        settings(target_folder, data, tmp_path, **BASELINE | {"num_layers": 2})


# PyTorch says that its normalisation does not take the fused path for mixed types.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_bfloat16_computes_finite_losses_and_keeps_float32_weights(
    target_folder: Path, data: Path, tmp_path: Path
) -> None:
    result = train(settings(target_folder, data, tmp_path / "out", bf16=True), show_progress=False)
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in read_log(tmp_path / "out"))
    assert weights(result.checkpoint)["fc.weight"].dtype == torch.float32


def test_two_processes_learn_what_one_does(target_folder: Path, data: Path, tmp_path: Path) -> None:
    alone = settings(target_folder, data, tmp_path / "one", max_steps=5)
    train(alone, show_progress=False)
    shared = settings(target_folder, data, tmp_path / "two", max_steps=5)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, *command_of(shared)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    curves = [[line["loss"] for line in read_log(tmp_path / name) if "loss" in line] for name in ("one", "two")]
    assert len(curves[0]) == 5
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)
    one, two = (weights(tmp_path / name / "step-00000005") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)
    assert json.loads((tmp_path / "two" / "run.json").read_text())["num_processes"] == 2


def test_control_c_finishes_the_step_and_leaves_a_checkpoint_to_go_on_from(
    target_folder: Path, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    config = settings(target_folder, data, output, max_steps=100_000)
    process = subprocess.Popen(
        [sys.executable, *command_of(config)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        deadline_s = time.monotonic() + 60
        while not (output / "log.jsonl").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "--resume goes on" in errors
    (folder,) = step_folders(output)
    assert out.strip() == str(folder)
    step = int(folder.name.removeprefix("step-"))
    assert read_log(output)[-1]["step"] == step
    again = settings(target_folder, data, output, max_steps=100_000, resume=True, stop_at_step=step + 1)
    assert train(again, show_progress=False).step == step + 1
