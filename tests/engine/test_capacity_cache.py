"""Where measured times come from: the cache that keeps them, the file a user gives, measuring."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drafter_cases import tiny_target

from dspark.config import EngineConfig
from dspark.engine import capacity_cache
from dspark.engine.capacity_cache import MADE_FOR, PEAK, capacity_key, capacity_path, load_or_measure, machine_times
from dspark.engine.drafter_choice import DrafterChoice
from dspark.engine.profile_rows import ProfileLimits
from dspark.engine.runner import Runner
from dspark.errors import ConfigError
from dspark.models.model_source import ModelFolder
from dspark.speculation.capacity import MeasuredTimes, TimeCurve, write_measured_times
from dspark.speculation.ngram import NgramProposer
from dspark.speculation.proposal import Draft

KEY = {"model": "toy/model", "num_threads": 2}
TIMES = MeasuredTimes(target=TimeCurve((1, 2), (0.5, 0.25)), max_tokens=16, details={PEAK: 1e9})
LIMITS = ProfileLimits(max_batch_tokens=16, max_size=4, max_model_len=64, num_pages=32, page_size=4, num_draft_tokens=3)
NO_DRAFTER = DrafterChoice(source=None, has_ngram=True)


class Measuring:
    """Counts how often it is asked."""

    def __init__(self, times: MeasuredTimes = TIMES) -> None:
        self.times = times
        self.count = 0

    def __call__(self) -> MeasuredTimes:
        self.count += 1
        return self.times


class PassProposer(NgramProposer):
    """A drafter with a pass."""

    name = "pass"
    has_pass = True

    def propose(self, contexts):
        return [Draft(token_ids=[1]) for _ in contexts]


def model_of(folder: Path, sha256: str | None = None) -> SimpleNamespace:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"hidden_size": 64}')
    return SimpleNamespace(decoder=tiny_target(), folder=ModelFolder(path=folder, name=folder.name, gguf_sha256=sha256))


def tiny_times(tmp_path: Path, proposer=None, **more):
    runner = Runner(tiny_target(), num_pages=LIMITS.num_pages, page_size=LIMITS.page_size)
    return machine_times(
        model_of(tmp_path / "m"), NO_DRAFTER, EngineConfig(), runner=runner, proposer=proposer, limits=LIMITS,
        cache_dir=tmp_path, **more,
    )  # fmt: skip


# -- the cache -----------------------------------------------------------------------------------------------------


def test_what_was_measured_is_read_by_the_next_start(tmp_path):
    measuring = Measuring()
    first = load_or_measure(KEY, measuring, cache_dir=tmp_path)
    second = load_or_measure(KEY, measuring, cache_dir=tmp_path)
    assert measuring.count == 1
    assert first == second
    assert (first.is_new, second.is_new) == (True, False)
    assert first.times == replace(TIMES, details={PEAK: 1e9, MADE_FOR: KEY})
    assert first.path == capacity_path(KEY, tmp_path)
    assert json.loads(first.path.read_text())["sample_batch_tokens"] == [1, 2]


def test_anew_measures_whatever_the_cache_holds(tmp_path):
    load_or_measure(KEY, Measuring(), cache_dir=tmp_path)
    slower = Measuring(replace(TIMES, target=TimeCurve((1, 2), (1.0, 2.0))))
    load_or_measure(KEY, slower, anew=True, cache_dir=tmp_path)
    assert slower.count == 1
    assert load_or_measure(KEY, Measuring(), cache_dir=tmp_path).times.target.seconds == (1.0, 2.0)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read"),
        ('{"sample_batch_tokens": [1, 2]}', "has no sample_steps_per_sec"),
        ('{"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1, 1], "max_batch_tokens": 9}', "something else"),
    ],
)
def test_a_broken_or_foreign_file_is_measured_again_with_a_warning(content, reason, tmp_path, caplog):
    path = capacity_path(KEY, tmp_path)
    path.parent.mkdir()
    path.write_text(content)
    measuring = Measuring()
    assert load_or_measure(KEY, measuring, cache_dir=tmp_path).times.target == TIMES.target
    assert measuring.count == 1
    assert reason in caplog.text
    assert str(path) in caplog.text
    load_or_measure(KEY, measuring, cache_dir=tmp_path)
    assert measuring.count == 1


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "capacity").write_text("a file where the folder should be")
    found = load_or_measure(KEY, Measuring(), cache_dir=tmp_path)
    assert (found.times.target, found.path) == (TIMES.target, None)
    assert "cannot be written" in caplog.text
    assert "measured again at each start" in caplog.text


def test_another_key_has_another_file(tmp_path):
    other = capacity_path(KEY | {"num_threads": 3}, tmp_path)
    assert other != capacity_path(KEY, tmp_path)
    assert other.parent == tmp_path / "capacity"
    assert other.name.startswith("toy-model-")


# -- what the times depend on --------------------------------------------------------------------------------------


def test_the_key_is_json_and_names_what_the_times_depend_on(tmp_path):
    key = capacity_key(model_of(tmp_path / "m"), NO_DRAFTER, EngineConfig(), LIMITS)
    assert json.loads(json.dumps(key)) == key
    assert (key["model"], key["dtype"], key["num_threads"]) == ("m", "float32", torch.get_num_threads())
    assert "cores" in key["hardware"]


def test_a_model_is_known_by_its_file_or_else_by_its_configuration(tmp_path):
    key = capacity_key(model_of(tmp_path / "m"), NO_DRAFTER, EngineConfig(), LIMITS)
    moved = capacity_key(model_of(tmp_path / "other"), NO_DRAFTER, EngineConfig(), LIMITS)
    assert key["model_hash"] == moved["model_hash"] is not None
    converted = capacity_key(model_of(tmp_path / "m", sha256="ab"), NO_DRAFTER, EngineConfig(), LIMITS)
    assert converted["model_hash"] == "ab"


def test_a_drafter_counts_with_its_length_and_ngram_does_not(tmp_path):
    model, config = model_of(tmp_path / "m"), EngineConfig()
    drafter = DrafterChoice(source=str(model_of(tmp_path / "d").folder.path), has_ngram=True)
    plain = capacity_key(model, DrafterChoice(source=None, has_ngram=False), config, LIMITS)
    longer = replace(LIMITS, num_draft_tokens=7)
    assert plain == capacity_key(model, NO_DRAFTER, config, longer)
    drafted = capacity_key(model, drafter, config, LIMITS)
    assert drafted["drafter_hash"] is not None
    assert drafted != plain
    assert drafted != capacity_key(model, drafter, config, longer)


# -- all together --------------------------------------------------------------------------------------------------


def test_a_model_is_measured_once_with_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(capacity_cache, "measure_peak_bytes_per_s", lambda device: 2e9)
    first = tiny_times(tmp_path)
    assert first.times.target.sizes == (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
    assert (first.times.details[PEAK], first.times.max_tokens) == (2e9, 16)
    assert first.path is not None
    assert first.path.parent == tmp_path / "capacity"
    again = tiny_times(tmp_path)
    assert again.times.target.seconds == pytest.approx(
        first.times.target.seconds, rel=1e-12
    )  # kept as steps per second
    assert (again.times.details, again.path) == (first.times.details, first.path)


def test_a_capacity_file_is_taken_as_it_is(tmp_path):
    path = tmp_path / "sps.json"
    write_measured_times(path, TIMES)
    found = tiny_times(tmp_path, capacity_file=path)
    assert (found.times, found.path, found.is_new) == (TIMES, path, False)
    assert not (tmp_path / "capacity").exists()


def test_what_a_capacity_file_does_not_say_of_drafting_is_measured(tmp_path):
    """J5: other engines write no cost of drafting, which is not nothing."""
    path = tmp_path / "sps.json"
    write_measured_times(path, TIMES)
    found = tiny_times(tmp_path, proposer=PassProposer(), capacity_file=path)
    assert found.times.target == TIMES.target
    assert found.times.draft is not None
    assert found.times.draft.sizes == (1, 2, 4)


def test_a_capacity_file_that_cannot_be_used_is_the_users_mistake(tmp_path):
    with pytest.raises(ConfigError, match=r"the capacity file .* cannot be read"):
        tiny_times(tmp_path, capacity_file=tmp_path / "absent.json")
