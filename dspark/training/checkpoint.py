"""Checkpoints of a run: numbered folders, each a loadable drafter with the optimizer's state beside it.

A folder appears complete or not at all, so that neither a full disk nor an interruption leaves half of one.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dspark.durable_file import sync
from dspark.errors import CheckpointError
from dspark.models.autoregressive_checkpoint import is_autoregressive_folder, load_autoregressive, save_autoregressive
from dspark.models.autoregressive_module import AutoregressiveModule
from dspark.models.decoder import Decoder
from dspark.models.drafter_checkpoint import load_drafter_checkpoint, save_drafter
from dspark.models.drafter_formats import SPECULATORS
from dspark.models.drafter_module import DrafterModule

TrainedModule = DrafterModule | AutoregressiveModule

_STATE = "training_state.pt"
_RECORD = "training.json"
_FOLDER = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Where a run stands. Draws are keyed by seed, epoch and conversation, so the step is all there is to remember."""

    step: int  # steps done
    optimizer: dict[str, Any]
    identity: dict[str, str]  # of the data (`identity.data_identity`)
    settings: dict[str, Any]  # `TrainConfig.learned_settings`


def step_folders(output: Path) -> list[Path]:
    """Return the checkpoint folders of a run, oldest first."""
    if not output.is_dir():
        return []
    return sorted(
        (path for path in output.iterdir() if _FOLDER.fullmatch(path.name) and (path / _RECORD).exists()),
        key=lambda path: int(path.name.removeprefix("step-")),
    )


def save_checkpoint(output: Path, module: TrainedModule, state: TrainingState, *, keep: int) -> Path:
    """Write `output`/step-N and remove all but the newest `keep`; return the folder.

    Raises `CheckpointError` when the disk does not take it; older checkpoints are then untouched.
    """
    folder = output / f"step-{state.step:08d}"
    try:
        output.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=output))
        try:
            if isinstance(module, AutoregressiveModule):
                save_autoregressive(work / "drafter", module)
            else:
                # Layout speculators: the target's embedding and head stay out of the file.
                save_drafter(work / "drafter", module.config, module.state_dict(), layout=SPECULATORS)
            complete = work / "drafter"
            with (complete / _STATE).open("wb") as file:
                torch.save(state.optimizer, file)
            record = {"step": state.step, "identity": state.identity, "settings": state.settings}
            (complete / _RECORD).write_text(json.dumps(record, indent=2, sort_keys=True), encoding="utf-8")
            for path in (*complete.iterdir(), complete):
                sync(path)
            complete.replace(folder)
            sync(output)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save reports a full disk as RuntimeError
        raise CheckpointError(
            f"the checkpoint {folder} cannot be written: {error}; free space and resume from the one before"
        ) from error
    for old in step_folders(output)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def load_record(folder: Path) -> Mapping[str, Any]:
    """Return the step, identity and settings of a checkpoint. Raises `CheckpointError` when it is damaged."""
    path = folder / _RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return {"step": int(record["step"]), "identity": record["identity"], "settings": record["settings"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; remove {folder} to go on from the one before") from error


def load_module(folder: Path, target: Decoder) -> TrainedModule:
    """Return the drafter in `folder` for training or measuring, with what its files leave to the target."""
    if is_autoregressive_folder(folder):
        return load_autoregressive(folder, target)
    checkpoint = load_drafter_checkpoint(folder, dtype=torch.float32, device=target.device).completed(target)
    return DrafterModule.from_tensors(checkpoint.config, checkpoint.tensors)


def load_optimizer_state(folder: Path) -> dict[str, Any]:
    """Return the optimizer's state. Raises `CheckpointError` when it is damaged."""
    path = folder / _STATE
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises many kinds, each about the file
        raise CheckpointError(f"{path} is damaged: {error}; remove {folder} to go on from the one before") from error
    return state
