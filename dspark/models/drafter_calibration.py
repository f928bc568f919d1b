"""The calibration file beside a drafter, `sts.json`: temperatures of its confidence logits, one for each proposal."""

from __future__ import annotations

import json
from pathlib import Path

from dspark.errors import CheckpointError

CALIBRATION = "sts.json"
_LEAST, _MOST = 1e-3, 1e3  # no fit gives a temperature beyond


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
