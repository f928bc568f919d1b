"""`dspark profile` on a tiny target: tables, the cache, the file for other engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from training_cases import save_target

from dspark.cli import main
from dspark.speculation.capacity import read_measured_times


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(tmp_path_factory.mktemp("cli") / "target"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "dspark" / "capacity"


def profile(target: str, *more: str) -> int:
    # A model that drafts for itself has a pass.
    return main(["profile", "--model", target, "--drafter", target, "--max-batch-tokens", "16", "--max-batch-size", "2",
                 "--num-draft-tokens", "2", "--threads", "1", *more])  # fmt: skip


def test_the_machine_is_measured_anew_shown_and_kept(
    target: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "given" / "sps.json"
    assert profile(target, "--output", str(output)) == 0
    shown = capsys.readouterr().out
    (kept,) = cache.iterdir()
    assert shown.splitlines()[-2:] == [str(kept), str(output)]
    assert "target in float32 on" in shown
    assert "tokens of a pass" in shown
    assert "requests of a drafting pass" in shown
    measured = read_measured_times(output)
    assert measured.target.sizes == (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
    assert measured.draft is not None
    assert measured.draft.sizes == (1, 2)
    assert json.loads(kept.read_text()) == json.loads(output.read_text())

    old = json.loads(kept.read_text())
    kept.write_text(json.dumps(old | {"sample_steps_per_sec": [1.0] * 11}))
    assert profile(target, "--scheduler", "fixed") == 0  # whatever the cache holds and the settings schedule with
    assert json.loads(kept.read_text())["sample_steps_per_sec"][0] > 2.0


def test_a_folder_as_output_is_refused_before_anything_is_measured(
    target: str, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert profile(target, "--output", str(tmp_path)) == 2
    assert f"--output ({tmp_path}) is a folder; name a file in it" in capsys.readouterr().err
    assert not cache.exists()
