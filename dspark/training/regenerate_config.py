"""The settings of `dspark regenerate`, without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dspark.errors import ConfigError
from dspark.request import SamplingParams

# What these name is compared by content, or does not matter.
_FREE_ON_RESUME = frozenset({"output", "prompts"})


def _setting(default: Any, meaning: str) -> Any:
    """Declare a setting; `dspark regenerate --help` shows its meaning."""
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class RegenerateConfig:
    """Everything the answers depend on beside the target. Raises `ConfigError` or `RequestError` naming the setting."""

    output: str = field(
        metadata={"help": "file of JSON lines, for dspark train; the same command again goes on with it"}
    )
    prompts: tuple[str, ...] = _setting((), "JSON lines with prompt, turns, messages or prompt_ids")
    self_prompt: int | None = _setting(None, "in place of files: the target writes this many user turns itself")
    temperatures: tuple[float, ...] = _setting((0.0, 0.6, 1.0), "conversation i takes number i modulo their count")
    top_k: int = _setting(200, "most likely tokens kept, also for user turns; 0 is off")
    top_p: float = _setting(1.0, "nucleus mass; 1 is off")
    max_tokens: int = _setting(512, "tokens of an answer at most; longer ones are kept, cut")
    max_user_tokens: int = _setting(128, "tokens of a self-written user turn at most; longer ones are dropped")
    seed: int = _setting(0, "of all draws, keyed by conversation and turn")

    def __post_init__(self) -> None:
        if bool(self.prompts) == (self.self_prompt is not None):
            given = "both" if self.prompts else "neither"
            raise ConfigError(f"prompt files and self_prompt: {given} given; give one of them")
        if self.self_prompt is not None and self.self_prompt < 1:
            raise ConfigError(f"self_prompt ({self.self_prompt}) must be at least 1; raise it")
        if self.max_user_tokens < 1:
            raise ConfigError(f"max_user_tokens ({self.max_user_tokens}) must be at least 1; raise it")
        if not self.temperatures:
            raise ConfigError("temperatures () is empty; give at least one, such as 0,0.6,1.0")
        for index in range(len(self.temperatures)):
            self.sampling(index, seed=0, max_tokens=self.max_tokens)

    def temperature(self, index: int) -> float:
        """Return the temperature of conversation `index`."""
        return self.temperatures[index % len(self.temperatures)]

    def sampling(self, index: int, *, seed: int, max_tokens: int) -> SamplingParams:
        """Return how an answer in conversation `index` is drawn."""
        return SamplingParams(
            temperature=self.temperature(index), top_k=self.top_k, top_p=self.top_p, seed=seed, max_tokens=max_tokens
        )

    def compared_settings(self) -> dict[str, Any]:
        """Return the settings that a run which goes on must share, as JSON values."""
        return {name: value for name, value in self.to_json().items() if name not in _FREE_ON_RESUME}

    def to_json(self) -> dict[str, Any]:
        """Return all settings as JSON values."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
