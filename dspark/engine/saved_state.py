"""What a proposer learned of all requests, kept for the next start with the same weights: a file in the user's cache.

How often drafts are accepted, and by how much confidences are off, is known at once then. Which text comes out does not
depend on it. Only `dspark serve` reads and writes such files: a measurement must not depend on earlier runs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.config import EngineConfig
from dspark.durable_file import write_durably
from dspark.engine.capacity_cache import MADE_FOR, cache_path, weights_identity
from dspark.engine.drafter_choice import DrafterChoice
from dspark.models.drafter_calibration import CALIBRATION

if TYPE_CHECKING:
    from dspark.engine.build import LoadedModel
    from dspark.engine.engine import Engine

logger = logging.getLogger(__name__)

LEARNED = "learned"  # key of the file, and the folder in the user's cache


class SavedState:
    """One such file. `take` belongs to the thread that runs the engine; `write` may take its time in another one."""

    def __init__(self, key: Mapping[str, Any], *, cache_dir: Path | None = None) -> None:
        """`key` (JSON values) is all that the state belongs to; the file says it and is found by it."""
        self.path = cache_path(LEARNED, key, cache_dir)
        self._key = dict(key)
        self._known: dict[str, Any] | None = None  # what the file holds, or nothing worth a file
        self._cannot_write = False

    def restore(self, engine: Engine) -> bool:
        """Let an engine that has had no request go on from the file; False where there is none that can be used.

        A damaged file is a warning, and the next `write` replaces it.
        """
        if engine.drafting is None:
            return False
        proposer, state = engine.drafting.proposer, self._read()
        try:
            if state is not None:
                proposer.restore_state(state)
        except Exception as error:  # whatever the values of a damaged file lead to
            logger.warning("what was learned (%s) cannot be used: %r; starting without it", self.path, error)
            state = None
        self._known = proposer.export_state()
        return state is not None

    def take(self, engine: Engine) -> dict[str, Any] | None:
        """Return what there is to write, between two steps; None where nothing is new or the drafter hangs."""
        drafting = engine.drafting
        if drafting is None or drafting.guard.is_blocked:
            return None
        state = drafting.proposer.export_state()
        return None if state == self._known else state

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the file. That it cannot be written is said once."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(self.path, json.dumps({MADE_FOR: self._key, LEARNED: state}, indent=1))
        except (OSError, ValueError) as error:
            if not self._cannot_write:
                logger.warning("what was learned cannot be kept for the next start in %s: %s", self.path, error)
            self._cannot_write = True
            return
        self._cannot_write = False
        self._known = dict(state)

    def _read(self) -> dict[str, Any] | None:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or a number too long
            logger.warning("what was learned (%s) cannot be read: %s; starting without it", self.path, error)
            return None
        state = content.get(LEARNED) if isinstance(content, dict) else None
        if not isinstance(state, dict) or content.get(MADE_FOR) != self._key:
            logger.warning("what was learned (%s) belongs to something else; starting without it", self.path)
            return None
        return state


def state_key(
    model: LoadedModel,
    choice: DrafterChoice,
    config: EngineConfig,
    *,
    proposer_name: str,
    drafter_folder: Path | None,
) -> dict[str, Any]:
    """Return, as JSON values, what the learned belongs to: weights, calibration, and how drafts are judged."""
    return {
        **weights_identity(model, choice),
        "model_files": None if model.folder.gguf_sha256 else _files(model.folder.path),
        "drafter_files": None if drafter_folder is None else _files(drafter_folder),
        "proposer": proposer_name,
        "verification": config.speculation.verification,
    }


def _files(folder: Path) -> list[list[Any]]:
    """Return name, size and time of the files that hold weights and temperatures.

    Hashing them would hold up the start with a large model; a copy that starts from nothing once is no loss.
    """
    paths = sorted([*folder.glob("*.safetensors"), *folder.glob(CALIBRATION)])
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
