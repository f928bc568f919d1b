"""How prompts are answered where served acceptance is measured. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.errors import ConfigError
from dspark.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """How the prompts are answered."""

    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 128
    num_prompts: int | None = None  # of each file; None: all
    concurrency: int = 8
    # Request i gets seed + i. Seeded requests are verified by `coupled`, whose acceptance is not that of `rejection`.
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "num_prompts", "concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} ({value}) must be at least 1; raise it")
        if not self.temperatures:
            raise ConfigError("temperatures is empty; give at least one, such as 0")
        if len(set(self.temperatures)) < len(self.temperatures):
            raise ConfigError(f"temperatures ({self.temperatures}) holds one twice; remove it")
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises `RequestError` naming it
