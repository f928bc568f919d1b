"""The torch device that a setting names."""

from __future__ import annotations

import torch

from dspark.errors import ConfigError, first_line


def open_device(name: str) -> torch.device:
    """Return the torch device `name`. Raises `ConfigError` when it cannot be used here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # a device may exist and hold no numbers ("meta")
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch's kinds for absent and unknown devices
        raise ConfigError(
            f"device ({name!r}) cannot be used here: {first_line(error)}; use cpu or another device"
        ) from error
    return device
