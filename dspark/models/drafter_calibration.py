"""What calibration writes: `sts.json` beside a drafter, and a refitted confidence head into its weights.

`sts.json` holds temperatures of the confidence logits, one for each proposal. F inputs of the confidence head.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.durable_file import sync
from dspark.errors import CheckpointError

CALIBRATION = "sts.json"
_LEAST, _MOST = 1e-3, 1e3  # no fit gives a temperature beyond
_WEIGHT, _BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"


@dataclass(frozen=True, kw_only=True)
class ConfidenceHead:
    """The linear map that states confidence logits (Eq. 7)."""

    weights: np.ndarray  # [F] float64
    bias: float


def load_temperatures(folder: Path, *, num_draft_tokens: int) -> tuple[float, ...] | None:
    """Return the temperatures [K] beside the drafter in `folder`; None where it has no calibration file.

    Raises `CheckpointError` naming a file that is damaged, or of another drafter.
    """
    path = folder / CALIBRATION
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or a number too long
        raise CheckpointError(f"{path} cannot be read as JSON: {error}; calibrate again or remove the file") from error
    temperatures = content.get("temperatures") if isinstance(content, dict) else None
    if (
        not isinstance(temperatures, list)
        or len(temperatures) != num_draft_tokens
        or not all(type(t) in (int, float) and _LEAST <= t <= _MOST for t in temperatures)
    ):
        raise CheckpointError(
            f"temperatures ({temperatures!r}) in {path} must be a list of {num_draft_tokens} numbers from {_LEAST} to "
            f"{_MOST:.0f}, one for each proposal of the drafter; calibrate again or remove the file"
        )
    return tuple(float(t) for t in temperatures)


def load_confidence_head(folder: Path) -> ConfidenceHead:
    """Return the confidence head of the drafter in `folder`, whose files were read before. Raises `CheckpointError`."""
    _, tensors, _ = _read(_weights_path(folder))
    weights = tensors[_WEIGHT].double().flatten().numpy()
    return ConfidenceHead(weights=weights, bias=float(tensors[_BIAS]))


def replace_confidence_head(folder: Path, head: ConfidenceHead) -> None:
    """Put `head` into the drafter in `folder`, in the stored type; all else in its files stays what it is, bit for bit.

    The file is replaced whole or not at all. Raises `CheckpointError` when it cannot be, or the type cannot hold it.
    """
    path = _weights_path(folder)
    metadata, tensors, mode = _read(path)
    values: dict[str, Tensor] = {
        _WEIGHT: torch.from_numpy(head.weights),
        _BIAS: torch.tensor(head.bias, dtype=torch.float64),
    }
    for name, value in values.items():
        stored = value.to(tensors[name].dtype).reshape(tensors[name].shape)
        if not bool(stored.isfinite().all()):
            raise CheckpointError(
                f"the refitted {name} (up to {float(value.abs().max()):g}) is beyond what {path} stores "
                f"({str(stored.dtype).removeprefix('torch.')}); export the drafter as float32 first"
            )
        tensors[name] = stored
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            save_file(tensors, temporary, metadata)
            temporary.chmod(mode)
            sync(temporary)
            temporary.replace(path)
            sync(folder)
        finally:
            temporary.unlink(missing_ok=True)  # gone already when all went well
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be replaced: {error}; free space, or copy the drafter to a folder of yours"
        ) from error


def _weights_path(folder: Path) -> Path:
    """Return the file that holds the confidence head, whole."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return folder / "model.safetensors"
    try:
        homes = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {homes[name] for name in (_WEIGHT, _BIAS)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged: {error!r}; download the drafter again") from error
    if len(names) > 1:  # two files cannot be replaced at once
        raise CheckpointError(
            f"the confidence head in {folder} is spread over {', '.join(sorted(names))}; export the drafter, which "
            "writes one file, and calibrate that"
        )
    return folder / str(names.pop())


def _read(path: Path) -> tuple[dict[str, str] | None, dict[str, Tensor], int]:
    """Return metadata, tensors and mode of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 no mapping
            return file.metadata(), tensors, path.stat().st_mode & 0o777
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download the drafter again") from error
