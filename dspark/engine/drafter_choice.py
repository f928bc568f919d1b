"""What the setting `drafter` means for a target: which files draft, and whether n-gram drafts go with them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from dspark.errors import ConfigError
from dspark.models.model_source import ModelFolder
from dspark.models.shipped_drafters import models_with_shipped_drafter, shipped_drafter

logger = logging.getLogger(__name__)

NONE, NGRAM, AUTO, SHIPPED = "none", "ngram", "auto", "dspark"
WITH_NGRAM = "+ngram"


@dataclass(frozen=True, kw_only=True)
class DrafterChoice:
    """The proposers of an engine."""

    source: str | None  # name or folder of a drafter or a smaller model, as for `resolve_model`; None: neither
    has_ngram: bool


def choose_drafter(setting: str, target: ModelFolder) -> DrafterChoice:
    """Return what `setting` means for `target`.

    "none", "ngram", "auto" (the drafter that ships for the target together with n-gram, or n-gram alone), "dspark"
    (the shipped one), else a path or name; "+ngram" after the last two adds n-gram. The words win over files of the
    same name, an existing path that ends in "+ngram" wins over the suffix. Raises `ConfigError`.
    """
    if setting == NONE:
        return DrafterChoice(source=None, has_ngram=False)
    if setting == NGRAM:
        return DrafterChoice(source=None, has_ngram=True)
    if setting == AUTO:
        return _automatic(target)
    source, has_ngram = setting, False
    if setting.endswith(WITH_NGRAM) and not Path(setting).expanduser().exists():
        source, has_ngram = setting.removesuffix(WITH_NGRAM), True
        if source in ("", NONE, NGRAM, AUTO):
            raise ConfigError(
                f"drafter ({setting!r}) names no drafter that n-gram could be added to; use {SHIPPED}{WITH_NGRAM}, "
                f"PATH{WITH_NGRAM}, {AUTO} or {NGRAM}"
            )
    return DrafterChoice(source=_shipped(target) if source == SHIPPED else source, has_ngram=has_ngram)


def _automatic(target: ModelFolder) -> DrafterChoice:
    folder = shipped_drafter(target)
    if folder is None:
        logger.info("no drafter ships for %s: n-gram drafts are used", target.name)
        return DrafterChoice(source=None, has_ngram=True)
    logger.info("the drafter that ships for %s is used together with n-gram drafts", target.name)
    return DrafterChoice(source=str(folder), has_ngram=True)


def _shipped(target: ModelFolder) -> str:
    folder = shipped_drafter(target)
    if folder is None:
        names = ", ".join(models_with_shipped_drafter()) or "none in this installation"
        raise ConfigError(
            f"no drafter ships for the model {target.name!r} (drafter {SHIPPED!r}); models that have one: {names}. "
            f"Train one with `dspark train` (docs/train_your_own.md) and give its folder, or use --drafter {NGRAM}"
        )
    return str(folder)
