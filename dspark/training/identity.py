"""What a run's numbers depend on, as hashes by name: a resumed run or a stored cache must agree with all of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dspark.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "spiece.model")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
_SAMPLE_BYTES = 2**20


def data_identity(
    paths: Sequence[Path],
    folder: Path,  # of the target
    *,
    tap_ids: Sequence[int],
    seed: int,
    max_length: int,
) -> dict[str, str]:
    """Return hashes of the data files, the target, its tokenizer and template, and the values that shape features."""
    return text_identity(paths, folder) | {
        "tapped layers": ",".join(map(str, tap_ids)),
        "seed": str(seed),
        "max_length": str(max_length),
    }


def text_identity(paths: Sequence[Path], folder: Path) -> dict[str, str]:
    """Return hashes of the data files, and of the target in `folder`, its tokenizer and template."""
    return {
        "data": _digest(_file_digest(path) for path in paths),
        "target": _digest([*_contents(folder, ["config.json"]), *_weight_samples(folder)]),
        "tokenizer": _digest(_contents(folder, _TOKENIZER_FILES)),
        "chat template": _digest(_contents(folder, _TEMPLATE_FILES)),
    }


def combined(identity: Mapping[str, str]) -> str:
    """Return one hash of a whole identity, for records."""
    return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()


def check_same(stored: Mapping[str, object], now: Mapping[str, object], *, what: str, advice: str) -> None:
    """Raise `ConfigError` naming what differs between a `stored` record and the run at hand."""
    changed = sorted(key for key in stored.keys() | now.keys() if stored.get(key) != now.get(key))
    if changed:
        details = "; ".join(f"{key}: {_short(stored.get(key))} then, {_short(now.get(key))} now" for key in changed)
        raise ConfigError(f"{what} was made with other values of {', '.join(changed)} ({details}); {advice}")


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:12] + "..."


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _contents(folder: Path, names: Iterable[str]) -> list[str]:
    return [f"{name} {_file_digest(folder / name)}" for name in names if (folder / name).exists()]


def _weight_samples(folder: Path) -> list[str]:
    """Return the size, start and end of each weight file: telling models apart need not read all of a large one."""
    samples = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest = hashlib.sha256(file.read(_SAMPLE_BYTES))
            size = path.stat().st_size
            file.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(file.read())
        samples.append(f"{path.name} {size} {digest.hexdigest()}")
    return samples
