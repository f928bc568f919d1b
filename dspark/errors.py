"""Errors a user can cause; each message says what was wrong, the values, and what to do."""

from __future__ import annotations


class DsparkError(ValueError):
    """Base of every error a user can cause."""


class ConfigError(DsparkError):
    """A setting, flag or configuration file is wrong."""


class CheckpointError(DsparkError):
    """A model or drafter on disk is missing, damaged, unsupported or does not fit; the file or tensor is named."""


class RequestError(DsparkError):
    """One request is wrong. The server answers 4xx naming `param`; the engine is not affected."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the error's kind where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
