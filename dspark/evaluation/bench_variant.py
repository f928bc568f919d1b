"""What a benchmark compares: a drafter as it would be served, or one that always drafts so many tokens. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from dspark.config import EngineConfig
from dspark.errors import ConfigError
from dspark.request import MAX_DRAFT_TOKENS

PLAIN = "none"
_WITH_LENGTH = re.compile(r"(?P<drafter>.+)@(?P<length>\d+)")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A drafter and, with `length`, the fixed scheduler: every round drafts and verifies so many tokens, if it can."""

    name: str  # as it was given
    drafter: str  # the setting `EngineConfig.drafter`
    length: int | None = None  # None: the scheduler and the draft length of the engine's settings

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Read "DRAFTER" or "DRAFTER@LENGTH". An existing path that ends like the latter is a drafter."""
        found = _WITH_LENGTH.fullmatch(name)
        if found is None or Path(name).expanduser().exists():
            return cls(name=name, drafter=name)
        drafter, length = found["drafter"], int(found["length"])
        if drafter == PLAIN:
            raise ConfigError(f"{name!r} verifies nothing whatever its length; use {PLAIN}")
        if length == 0:
            raise ConfigError(f"{name!r} verifies nothing, which is plain decoding; use {PLAIN}")
        if length > MAX_DRAFT_TOKENS:
            raise ConfigError(f"the length of {name!r} must be at most {MAX_DRAFT_TOKENS}; lower it")
        return cls(name=name, drafter=drafter, length=length)

    def config(self, config: EngineConfig) -> EngineConfig:
        """Return these settings for this variant."""
        if self.length is None:
            return replace(config, drafter=self.drafter)
        speculation = replace(
            config.speculation, scheduler="fixed", confidence_threshold=None, num_draft_tokens=self.length
        )
        return replace(config, drafter=self.drafter, speculation=speculation)
