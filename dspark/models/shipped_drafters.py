"""The drafters that come with the package, each for the weights of one model: found by what these are, not by a name.

Their files are in the folder `shipped_drafters` of the package, one folder per model.
"""

from __future__ import annotations

from pathlib import Path

import dspark
from dspark.config import DEFAULT_MODEL
from dspark.models.model_source import EMBEDDED_SHA256, ModelFolder

SHIPPED_FOLDER = Path(dspark.__file__).parent / "shipped_drafters"
# SHA-256 of the GGUF file that a model is converted from -> folder of its drafter, called as the model
SHIPPED_DRAFTERS = {EMBEDDED_SHA256: DEFAULT_MODEL}


def shipped_drafter(model: ModelFolder) -> Path | None:
    """Return the folder of the drafter that ships for exactly the weights of `model`; None where there is none."""
    name = SHIPPED_DRAFTERS.get(model.gguf_sha256 or "")
    return None if name is None or not _is_present(name) else SHIPPED_FOLDER / name


def models_with_shipped_drafter() -> list[str]:
    """Return the names of the models that a drafter ships for."""
    return sorted(filter(_is_present, SHIPPED_DRAFTERS.values()))


def _is_present(name: str) -> bool:
    return (SHIPPED_FOLDER / name / "config.json").is_file()
