"""What --drafter means, for models with and without a drafter that ships."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dspark.config import DEFAULT_MODEL, EngineConfig
from dspark.engine.drafter_choice import DrafterChoice, choose_drafter
from dspark.errors import ConfigError
from dspark.models import shipped_drafters
from dspark.models.model_source import EMBEDDED_SHA256, ModelFolder

EMBEDDED = ModelFolder(path=Path("m"), name=DEFAULT_MODEL, gguf_sha256=EMBEDDED_SHA256)
FINE_TUNED = ModelFolder(path=Path("m"), name=DEFAULT_MODEL)  # a folder of the same name, with weights of its own


@pytest.fixture(autouse=True)
def shipped(tmp_path, monkeypatch) -> str:
    """Let a drafter ship for the embedded model; return its folder."""
    folder = tmp_path / "package" / DEFAULT_MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(shipped_drafters, "SHIPPED_FOLDER", tmp_path / "package")
    monkeypatch.chdir(tmp_path)
    return str(folder)


def test_the_default_is_auto():
    assert EngineConfig().drafter == "auto"


def test_auto_is_the_shipped_drafter_with_ngram(shipped, caplog):
    with caplog.at_level(logging.INFO):
        assert choose_drafter("auto", EMBEDDED) == DrafterChoice(source=shipped, has_ngram=True)
    assert f"the drafter that ships for {DEFAULT_MODEL} is used together with n-gram drafts" in caplog.text


def test_auto_for_other_weights_is_ngram_and_says_so(caplog):
    with caplog.at_level(logging.INFO):
        assert choose_drafter("auto", FINE_TUNED) == DrafterChoice(source=None, has_ngram=True)
    assert caplog.text.count("no drafter ships for smollm2-135m: n-gram drafts are used") == 1


def test_auto_without_shipped_files_is_ngram(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped_drafters, "SHIPPED_FOLDER", tmp_path / "absent")
    assert choose_drafter("auto", EMBEDDED) == DrafterChoice(source=None, has_ngram=True)


@pytest.mark.parametrize(
    ("setting", "source", "has_ngram"),
    [
        ("none", None, False),
        ("ngram", None, True),
        ("some/folder", "some/folder", False),
        ("some/folder+ngram", "some/folder", True),
        ("owner/model+ngram", "owner/model", True),
        ("./dspark", "./dspark", False),
    ],
)
def test_words_and_paths(setting, source, has_ngram):
    assert choose_drafter(setting, EMBEDDED) == DrafterChoice(source=source, has_ngram=has_ngram)


@pytest.mark.parametrize(("setting", "has_ngram"), [("dspark", False), ("dspark+ngram", True)])
def test_dspark_is_the_shipped_drafter(setting, has_ngram, shipped):
    Path("dspark").mkdir()  # as in a checkout of this project
    assert choose_drafter(setting, EMBEDDED) == DrafterChoice(source=shipped, has_ngram=has_ngram)


def test_an_existing_path_that_ends_like_the_suffix_is_that_path():
    Path("odd+ngram").mkdir()
    assert choose_drafter("odd+ngram", EMBEDDED) == DrafterChoice(source="odd+ngram", has_ngram=False)
    assert choose_drafter("odd+ngram+ngram", EMBEDDED) == DrafterChoice(source="odd+ngram", has_ngram=True)


@pytest.mark.parametrize("setting", ["dspark", "dspark+ngram"])
def test_dspark_for_other_weights_names_the_models_that_have_one_and_the_ways_out(setting):
    with pytest.raises(ConfigError) as caught:
        choose_drafter(setting, FINE_TUNED)
    for part in ("no drafter ships for the model 'smollm2-135m'", "models that have one: smollm2-135m", "dspark train",
                 "docs/train_your_own.md", "--drafter ngram"):  # fmt: skip
        assert part in str(caught.value)


def test_an_installation_without_drafters_says_that_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped_drafters, "SHIPPED_FOLDER", tmp_path / "absent")
    with pytest.raises(ConfigError, match="models that have one: none in this installation"):
        choose_drafter("dspark", EMBEDDED)


@pytest.mark.parametrize("setting", ["+ngram", "none+ngram", "ngram+ngram", "auto+ngram"])
def test_ngram_with_nothing_is_refused(setting):
    with pytest.raises(ConfigError, match=r"names no drafter that n-gram could be added to; use dspark\+ngram"):
        choose_drafter(setting, EMBEDDED)
