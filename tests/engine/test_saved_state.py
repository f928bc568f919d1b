"""What a proposer learned: kept for the next start with the same weights, by nobody else, never a reason to fail."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from drafter_cases import FIXTURES
from toys import WordTokenizer

from dspark import LLM, SamplingParams
from dspark.config import EngineConfig, SpeculationConfig
from dspark.engine import build
from dspark.engine.build import ReadyEngine, load_engine, load_ready_engine
from dspark.engine.capacity_cache import MADE_FOR, MachineTimes
from dspark.engine.engine import Engine
from dspark.engine.saved_state import LEARNED, SavedState
from dspark.speculation.capacity import MeasuredTimes, TimeCurve

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KEY = {"model": "m"}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch) -> Path:
    """A cache of its own for each test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dspark" / "learned"


@pytest.fixture
def drafter_folder(tmp_path) -> Path:
    return shutil.copytree(FIXTURES / "deepspec_vanilla", tmp_path / "drafter")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> Path:
    folder = shutil.copytree(FIXTURES / "tiny_target", tmp_path_factory.mktemp("models") / "target")
    WordTokenizer(256).backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def config(target_folder, drafter_folder) -> EngineConfig:
    return EngineConfig(
        model=str(target_folder),
        drafter=f"{drafter_folder}+ngram",
        speculation=SpeculationConfig(scheduler="fixed"),
        num_threads=1,
    )


def learned(engine: Engine) -> dict:
    assert engine.drafting is not None
    return engine.drafting.proposer.export_state()


def answer(engine: Engine) -> list[int]:
    return LLM.from_engine(engine).generate([[5, 6, 7, 5, 6, 7, 5, 6]], PARAMS, show_progress=False)[0].token_ids


def run_and_save(config: EngineConfig) -> ReadyEngine:
    ready = load_ready_engine(config)
    assert ready.saved_state is not None
    answer(ready.engine)
    state = ready.saved_state.take(ready.engine)
    assert state is not None
    ready.saved_state.write(state)
    return ready


# -- from one start to the next ------------------------------------------------------------------------------------


def test_what_was_learned_is_known_at_the_next_start(config, cache_folder):
    first = run_and_save(config)
    second = load_ready_engine(config)
    assert learned(second.engine) == learned(first.engine) != learned(load_engine(config))
    assert [file.name for file in cache_folder.iterdir()] == [first.saved_state.path.name]
    assert answer(second.engine) == answer(load_engine(config))


def test_only_news_are_taken(config):
    ready = run_and_save(config)
    assert ready.saved_state.take(ready.engine) is None
    again = load_ready_engine(config)
    assert again.saved_state.take(again.engine) is None
    answer(again.engine)
    assert again.saved_state.take(again.engine) == learned(again.engine)


def test_a_fresh_engine_has_nothing_to_write(config):
    ready = load_ready_engine(config)
    assert ready.saved_state.take(ready.engine) is None


def change_weights(config: EngineConfig, drafter_folder: Path) -> EngineConfig:
    weights = drafter_folder / "model.safetensors"
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))
    return config


def calibrate(config: EngineConfig, drafter_folder: Path) -> EngineConfig:
    (drafter_folder / "sts.json").write_text(json.dumps({"temperatures": [1.5] * 7}))
    return config


def judge_otherwise(config: EngineConfig, drafter_folder: Path) -> EngineConfig:
    return EngineConfig(
        model=config.model,
        drafter=config.drafter,
        speculation=SpeculationConfig(scheduler="fixed", verification="block"),
        num_threads=1,
    )


@pytest.mark.parametrize("change", [change_weights, calibrate, judge_otherwise])
def test_nothing_is_taken_over_from_other_weights_temperatures_or_verifiers(config, drafter_folder, change, caplog):
    """J11: corrections of what is no longer stated would be errors."""
    first = run_and_save(config)
    changed = load_ready_engine(change(config, drafter_folder))
    assert changed.saved_state.path != first.saved_state.path
    assert learned(changed.engine) == learned(load_engine(config)) != learned(first.engine)
    assert caplog.text == ""


def test_measurements_neither_read_nor_write_what_was_learned(config, cache_folder):
    (file,) = (run_and_save(config).saved_state.path,)
    content = file.read_bytes()
    engine = load_engine(config)
    before = learned(engine)
    answer(engine)
    answer(LLM(config.model, drafter=config.drafter, speculation=config.speculation).engine)
    assert before == learned(load_engine(config))
    assert (list(cache_folder.iterdir()), file.read_bytes()) == ([file], content)


def test_plain_decoding_keeps_no_file(config):
    ready = load_ready_engine(EngineConfig(model=config.model, drafter="none", speculation=config.speculation))
    assert ready.saved_state is None
    assert len(answer(ready.engine)) == 24


# -- files that are no use -----------------------------------------------------------------------------------------


def damaged(content: dict, kind: str) -> bytes:
    if kind == "other_weights":
        content[MADE_FOR]["dspark"] = "0"
    elif kind == "ill_values":
        content[LEARNED] = {"drafter": {"positions": [[10**400, 10**400]]}, "ngram": 5, "choice": {"first": "x"}}
    text = json.dumps(content).encode()
    return {"cut": text[:50], "no_json": b"\xff\x00", "deep": b"[" * 100_000, "list": b"[1]"}.get(kind, text)


@pytest.mark.parametrize("kind", ["cut", "no_json", "deep", "list", "other_weights", "ill_values"])
def test_a_damaged_file_is_a_warning_and_replaced(config, kind, caplog):
    path = run_and_save(config).saved_state.path
    path.write_bytes(damaged(json.loads(path.read_text()), kind))
    ready = load_ready_engine(config)
    assert caplog.records
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert learned(ready.engine) == learned(load_engine(config))
    run_and_save(config)
    caplog.clear()
    load_ready_engine(config)
    assert not caplog.records


def test_a_proposer_that_cannot_go_on_from_its_state_is_a_warning(tmp_path, caplog):
    class Forgetful:
        def restore_state(self, state):
            raise KeyError("rates")

        def export_state(self):
            return {}

    state = SavedState(KEY, cache_dir=tmp_path)
    state.write({"a": 1})
    assert not state.restore(SimpleNamespace(drafting=SimpleNamespace(proposer=Forgetful())))
    assert "cannot be used: KeyError('rates')" in caplog.text


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, caplog):
    (tmp_path / LEARNED).write_text("a file where the folder should be")
    state = SavedState(KEY, cache_dir=tmp_path)
    state.write({"a": 1})
    state.write({"a": 2})
    assert caplog.text.count("cannot be kept for the next start") == 1


def test_a_drafter_that_hangs_is_left_alone(tmp_path):
    drafting = SimpleNamespace(guard=SimpleNamespace(is_blocked=True), proposer=None)
    assert SavedState(KEY, cache_dir=tmp_path).take(SimpleNamespace(drafting=drafting)) is None


# -- the rest of a cold start --------------------------------------------------------------------------------------


def test_the_log_says_in_one_line_what_speculation_runs(config, drafter_folder, caplog):
    with caplog.at_level(logging.INFO):
        run_and_save(config)
        assert (
            "speculation: dspark+ngram drafts up to 7 tokens, scheduler fixed, confidences as stated, "
            "acceptance not known yet"
        ) in caplog.text
        load_ready_engine(config)
        assert "acceptance as an earlier run left it" in caplog.text
        load_ready_engine(calibrate(config, drafter_folder))
        assert "confidences calibrated by sts.json" in caplog.text
        load_ready_engine(EngineConfig(model=config.model, drafter="none", speculation=config.speculation))
    assert "speculation: none, plain decoding" in caplog.text
    assert caplog.text.count("speculation: ") == 4


TIMES = MeasuredTimes(target=TimeCurve((1, 256), (0.5, 0.75)), max_tokens=256)


@pytest.mark.parametrize(("is_new", "num_warm_ups"), [(True, 0), (False, 1)])
def test_what_was_measured_just_now_needs_no_warm_up(config, monkeypatch, is_new, num_warm_ups, caplog):
    calls = []
    monkeypatch.setattr(build, "warm_up_passes", lambda *args, **options: calls.append(args))
    found = MachineTimes(times=TIMES, path=Path("times.json"), is_new=is_new)
    monkeypatch.setattr(build, "machine_times", lambda *args, **options: found)
    with caplog.at_level(logging.INFO):
        load_ready_engine(EngineConfig(model=config.model, drafter="ngram"))
    assert len(calls) == num_warm_ups
    assert f"times of this machine {'measured now' if is_new else 'from times.json'}" in caplog.text
