"""Names of what a benchmark compares."""

from __future__ import annotations

import pytest

from dspark.config import EngineConfig, SpeculationConfig
from dspark.errors import ConfigError
from dspark.evaluation.bench_variant import Variant


def test_a_drafter_keeps_the_settings_of_the_engine():
    config = EngineConfig(speculation=SpeculationConfig(scheduler="delayed", num_draft_tokens=4))
    assert Variant.parse("ngram").config(config) == EngineConfig(drafter="ngram", speculation=config.speculation)


def test_a_length_is_that_of_the_fixed_scheduler():
    config = EngineConfig(speculation=SpeculationConfig(scheduler="threshold", confidence_threshold=0.4))
    variant = Variant.parse("dspark+ngram@3")
    assert (variant.name, variant.drafter, variant.length) == ("dspark+ngram@3", "dspark+ngram", 3)
    assert variant.config(config) == EngineConfig(
        drafter="dspark+ngram", speculation=SpeculationConfig(scheduler="fixed", num_draft_tokens=3)
    )


def test_a_folder_that_is_called_so_is_a_drafter(tmp_path):
    folder = tmp_path / "run@3"
    assert Variant.parse(str(folder)) == Variant(name=str(folder), drafter=str(tmp_path / "run"), length=3)
    folder.mkdir()
    assert Variant.parse(str(folder)) == Variant(name=str(folder), drafter=str(folder))
    assert Variant.parse(f"{folder}@5") == Variant(name=f"{folder}@5", drafter=str(folder), length=5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("auto@0", "'auto@0' verifies nothing, which is plain decoding; use none"),
        ("none@3", "'none@3' verifies nothing whatever its length; use none"),
        ("ngram@65", "the length of 'ngram@65' must be at most 64"),
    ],
)
def test_what_verifies_nothing_or_too_much_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        Variant.parse(name)


@pytest.mark.parametrize("name", ["auto@", "@3", "auto@x", "auto@-1"])
def test_what_is_no_length_belongs_to_the_name(name):
    assert Variant.parse(name) == Variant(name=name, drafter=name)
