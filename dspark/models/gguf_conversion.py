"""GGUF files turned once into a model folder of plain weights, kept in the cache under the file's content hash."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dspark.errors import CheckpointError, first_line
from dspark.models.gguf_blocks import write_blocks
from dspark.models.kernels import exact_dtype
from dspark.models.model_config import decoder_config_from, read_json_object, reraise_interrupt

# Part of the folder's name: raise it when the conversion changes, so that old results are not used.
CONVERSION_VERSION = 3
# Names and sizes in bytes of the folder's other files, by which later damage is noticed.
MANIFEST_NAME = "conversion_manifest.json"
# Leftovers of a killed conversion are removed once they are older than any conversion takes.
STALE_AFTER_S = 24 * 3600
_PARTIAL_PREFIX = ".partial-"


def converted_folder(
    fetch: Callable[[Path], Path], *, sha256: str, label: str, cache_dir: Path, report: Callable[[str], None]
) -> Path:
    """Return the converted folder of the GGUF file with this `sha256`, making it if it is not there or damaged.

    `fetch` is called only then, with a folder for temporary files, and returns the GGUF file. The folder appears whole
    or not at all; of two processes that convert at once the second keeps the first one's result.
    """
    stem = f"{label}-{sha256[:16]}"
    folder = cache_dir / "models" / f"{stem}-v{CONVERSION_VERSION}"
    if _is_intact(folder):
        return folder
    if folder.exists():
        report(f"{folder} is damaged (files are missing or of another size); converting again")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder.parent)
        work = Path(tempfile.mkdtemp(prefix=_PARTIAL_PREFIX, dir=folder.parent))
    except OSError as error:
        raise CheckpointError(
            f"the cache folder {folder.parent} cannot be written: {error}; free or change it"
        ) from error
    try:
        result = work / "model"
        result.mkdir()
        gguf_path = fetch(work)
        report(f"converting {gguf_path.name} (done once, kept in {folder})")
        convert_gguf(gguf_path, result)
        _write_manifest(result)
        _publish(result, folder, aside=work)
        for version in range(1, CONVERSION_VERSION):
            with suppress(OSError):  # mostly there is none; one that cannot be removed is only in the way of the disk
                folder.with_name(f"{stem}-v{version}").rename(work / f"v{version}")
    except OSError as error:
        raise CheckpointError(f"{label} cannot be converted in {work}: {error}; free some space there") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Write the dequantised weights, configuration and tokenizer of a GGUF file into `folder`.

    Raises `CheckpointError` when the file is damaged or its architecture is not supported.
    """
    try:
        metadata = _read_metadata(gguf_path)
        _convert_model(gguf_path, folder, num_tensors=metadata["GGUF.tensor_count"])
        _convert_tokenizer(gguf_path, folder, metadata)
    except CheckpointError:
        raise
    except OSError as error:
        if error.errno is not None:  # of the file system; transformers also raises plain OSError about content
            raise
        raise _conversion_error(gguf_path, error) from error
    except Exception as error:  # gguf and transformers raise many kinds, each about the file's content
        reraise_interrupt(error)
        raise _conversion_error(gguf_path, error) from error
    generation: dict[str, Any] = {"eos_token_id": _eos_token_ids(metadata)}
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if f"tokenizer.ggml.{key}" in metadata:
            generation[name] = metadata[f"tokenizer.ggml.{key}"]
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _read_metadata(gguf_path: Path) -> dict[str, Any]:
    """Return the scalar metadata of a GGUF file, refusing files of which transformers would drop a part silently."""
    from gguf import GGUFReader, GGUFValueType

    reader = GGUFReader(gguf_path)
    metadata = {
        name: field.contents() for name, field in reader.fields.items() if field.types[:1] != [GGUFValueType.ARRAY]
    }
    # Scaled rotary frequencies stand in a tensor (Llama 3.1) or in keys that the conversion does not read.
    names = [tensor.name for tensor in reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
    scaling = f"{metadata.get('general.architecture')}.rope.scaling"
    if metadata.get(f"{scaling}.type", "none") != "none" and metadata.get(f"{scaling}.factor", 0.0) != 1.0:
        names.append(f"{scaling}.type")
    if names:
        raise CheckpointError(
            f"{gguf_path} scales its rotary frequencies ({names[0]}), which cannot be converted from GGUF; use the "
            "model's safetensors folder instead"
        )
    return metadata


def _convert_model(gguf_path: Path, folder: Path, *, num_tensors: int) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        gguf_path.parent,
        gguf_file=gguf_path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        output_loading_info=True,
    )
    model, loading = loaded
    model.config.save_pretrained(folder)
    config = decoder_config_from(folder)  # refuses what the decoder cannot run
    missing = sorted(loading["missing_keys"])
    if missing:  # transformers fills them with random numbers
        raise CheckpointError(
            f"tensor {missing[0]} is missing in {gguf_path} ({len(missing)} in all); download the file again"
        )
    is_tied = model.config.tie_word_embeddings
    tensors = {
        name: tensor.to(exact_dtype(tensor)).contiguous()
        for name, tensor in model.state_dict().items()
        if not (is_tied and name == "lm_head.weight")
    }
    if len(tensors) != num_tensors:  # transformers leaves out what the architecture does not know, biases for example
        raise CheckpointError(
            f"{gguf_path} holds {num_tensors} tensors of which {len(tensors)} belong to the architecture; use the "
            "model's safetensors folder instead"
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_blocks(gguf_path, folder, tensors, head_dim=config.head_dim)


def _convert_tokenizer(gguf_path: Path, folder: Path, metadata: dict[str, Any]) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name)
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        # transformers does not know this splitter and takes GPT-2's, which lets a digit end a run of spaces.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    tokenizer.save_pretrained(folder)


def _eos_token_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the ids that end a generation: end of text, and end of turn where the file has one of its own."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({metadata[key] for key in keys if key in metadata})


def _write_manifest(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / MANIFEST_NAME).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")


def _is_intact(folder: Path) -> bool:
    """Return whether `folder` holds the files of its manifest in their sizes; their content is not read."""
    try:
        sizes = read_json_object(folder / MANIFEST_NAME)
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _publish(result: Path, folder: Path, *, aside: Path) -> None:
    """Move a finished folder to its place, after its content has reached the disk.

    An intact folder of another process stays; a damaged one is moved into `aside`.
    """
    for path in result.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    with _locked(folder.parent):  # else a good folder that has just replaced the damaged one could be moved away
        if _is_intact(folder):
            return
        with suppress(FileNotFoundError):
            folder.rename(aside / "damaged")
        result.rename(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes that lock `folder` out; the lock ends with the process at the latest."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock; then only the unlikely race remains
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_PARTIAL_PREFIX}*"):
        with suppress(FileNotFoundError):  # another process may be removing it
            if time.time() - path.stat().st_mtime > STALE_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)


def _conversion_error(gguf_path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{gguf_path} cannot be converted: {first_line(error).rstrip('.')}; the file is damaged or of an "
        "unsupported kind, use the model's safetensors folder instead"
    )
