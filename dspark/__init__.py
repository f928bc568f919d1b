"""dspark: large language models answer faster without changing what they say."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.engine.llm import LLM
    from dspark.request import SamplingParams
    from dspark.structure import Structure

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "Structure", "__version__"]

_HOMES = {"LLM": "dspark.engine.llm", "SamplingParams": "dspark.request", "Structure": "dspark.structure"}


def __getattr__(name: str) -> Any:
    """Import these on first use, so that `dspark --help` does not load torch."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dspark' has no attribute {name!r}")
