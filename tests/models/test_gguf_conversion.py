"""A GGUF file becomes a whole model folder, once, and never half of one."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import TOKENS, write_gguf
from tiny_models import hf_logits, load, make_model, new_cache, run

from dspark.errors import CheckpointError
from dspark.models.gguf_conversion import MANIFEST_NAME, STALE_AFTER_S, converted_folder
from dspark.models.model_source import resolve_model
from dspark.models.tokenizer import load_generation_defaults, load_tokenizer

IDS = [1, 40, 200, 7, 99, 2, 14, 258, 3]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A GGUF file and the logits of its model."""
    model = make_model("llama", vocab_size=len(TOKENS))
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.5, 1.5, 48).half())  # exact in float16
    path = tmp_path_factory.mktemp("gguf") / "tiny-chat.gguf"
    write_gguf(path, model)
    return path, hf_logits(model, IDS)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(gguf: tuple[Path, torch.Tensor], cache_dir: Path) -> Path:
    return resolve_model(str(gguf[0]), cache_dir=cache_dir).path


def test_converted_weights_give_the_model_of_the_file(gguf: tuple[Path, torch.Tensor], folder: Path) -> None:
    decoder = load(folder)
    [logits] = run(decoder, new_cache(decoder), [(IDS, 0, [4, 0, 2])])
    torch.testing.assert_close(logits, gguf[1], atol=1e-4, rtol=1e-4)


def test_each_tensor_is_stored_in_the_smallest_exact_type(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.norm.weight"].dtype == torch.float16
    assert tensors["model.embed_tokens.weight"].dtype == torch.float32


def test_tokenizer_follows_the_file(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.encode("<|im_start|>hello") == [1, TOKENS.index("hello")]
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.bos_token_id == 1


def test_smollm_splitter_keeps_spaces_before_a_digit_together(folder: Path) -> None:
    """llama.cpp takes single digits out first, so two spaces before one stay a run that can merge."""
    assert load_tokenizer(folder).encode("  1") == [TOKENS.index("ĠĠ"), TOKENS.index("1")]


def test_chat_template_of_the_file_is_kept(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.render_chat([{"role": "user", "content": "hello"}])
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_end_of_text_and_end_of_turn_both_stop(folder: Path) -> None:
    defaults = load_generation_defaults(folder)
    assert defaults.eos_token_ids == {0, 2}
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p) == (None, None, None, None)


def test_generation_config_names_only_what_the_file_says(folder: Path) -> None:
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [0, 2], "bos_token_id": 1}


def test_second_use_takes_the_converted_folder(
    gguf: tuple[Path, torch.Tensor], folder: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    model = resolve_model(str(gguf[0]), cache_dir=cache_dir)
    assert (model.path, model.name) == (folder, "tiny-chat")
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


def test_other_content_under_the_same_name_is_converted_anew(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    folders = []
    for seed_family in ("llama", "llama-linear-rope"):
        model = make_model(seed_family, vocab_size=len(TOKENS), num_hidden_layers=1 if seed_family == "llama" else 2)
        write_gguf(path, model)
        folders.append(resolve_model(str(path), cache_dir=tmp_path / "cache").path)
    assert folders[0] != folders[1]


def test_progress_is_told_on_stderr(
    gguf: tuple[Path, torch.Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resolve_model(str(gguf[0]), cache_dir=tmp_path)
    captured = capsys.readouterr()
    assert "converting tiny-chat.gguf" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("keep", [4, 100, 9000, -5000])
def test_truncated_file_is_refused_and_leaves_nothing(
    gguf: tuple[Path, torch.Tensor], tmp_path: Path, keep: int
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(gguf[0].read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"cut\.gguf cannot be converted"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_architecture_that_only_transformers_knows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, make_model("llama-tied", vocab_size=len(TOKENS)), architecture="stablelm")
    with pytest.raises(CheckpointError, match="unsupported architecture"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_missing_tensor_is_named_instead_of_made_up(tmp_path: Path) -> None:
    path = tmp_path / "holey.gguf"
    model = make_model("llama", vocab_size=len(TOKENS))
    write_gguf(path, model, without="model.layers.1.self_attn.v_proj.weight")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight is missing in .*holey"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")


def test_tensor_that_the_conversion_would_drop_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "biased.gguf"
    write_gguf(path, make_model("llama", vocab_size=len(TOKENS)), extra="blk.0.attn_q.bias")
    with pytest.raises(CheckpointError, match=r"biased\.gguf holds 31 tensors of which 30 belong"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(("way", "name"), [("tensor", r"rope_freqs\.weight"), ("keys", r"llama\.rope\.scaling\.type")])
def test_rotary_scaling_is_refused_instead_of_dropped(tmp_path: Path, way: str, name: str) -> None:
    path = tmp_path / "scaled.gguf"
    write_gguf(path, make_model("llama", vocab_size=len(TOKENS)), scales_rotary=way)
    with pytest.raises(CheckpointError, match=rf"scaled\.gguf scales its rotary frequencies \({name}\)"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")


def test_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    write_gguf(path, make_model("llama", vocab_size=len(TOKENS)), architecture="rwkv6")
    with pytest.raises(CheckpointError, match=r"other\.gguf cannot be converted"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(CheckpointError, match="is not a GGUF file"):
        resolve_model(str(path), cache_dir=tmp_path / "cache")


def failing_fetch(error: BaseException) -> Callable[[Path], Path]:
    def fetch(folder: Path) -> Path:
        (folder / "half").write_bytes(b"x")
        raise error

    return fetch


def test_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        converted_folder(
            failing_fetch(KeyboardInterrupt()), sha256="0" * 64, label="m", cache_dir=tmp_path, report=print
        )
    assert list((tmp_path / "models").iterdir()) == []


def test_full_disk_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No space left.*free some space"):
        converted_folder(
            failing_fetch(OSError(28, "No space left on device")),
            sha256="0" * 64,
            label="m",
            cache_dir=tmp_path,
            report=print,
        )


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder should be")
    with pytest.raises(CheckpointError, match=r"cache folder .*models cannot be written"):
        converted_folder(lambda _: tmp_path, sha256="0" * 64, label="m", cache_dir=tmp_path, report=print)


def test_the_first_of_two_conversions_wins(gguf: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    def fetch_while_another_finishes(_: Path) -> Path:
        winner = tmp_path / "models" / f"m-{'0' * 16}-v3"
        winner.mkdir()
        (winner / "config.json").write_text("{}")
        (winner / MANIFEST_NAME).write_text('{"config.json": 2}')
        return gguf[0]

    folder = converted_folder(
        fetch_while_another_finishes, sha256="0" * 64, label="m", cache_dir=tmp_path, report=lambda _: None
    )
    assert {path.name for path in folder.iterdir()} == {"config.json", MANIFEST_NAME}
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


DAMAGES = [
    truncate_weights,
    empty,
    replace_by_a_file,
    lambda folder: (folder / "tokenizer.json").unlink(),
    lambda folder: (folder / MANIFEST_NAME).unlink(),
    lambda folder: (folder / MANIFEST_NAME).write_bytes(b"{"),
    lambda folder: (folder / MANIFEST_NAME).write_bytes(b"{}"),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folder_is_converted_again(
    gguf: tuple[Path, torch.Tensor],
    folder: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "models").mkdir()
    copy = tmp_path / "models" / folder.name
    shutil.copytree(folder, copy)
    damage(copy)
    assert resolve_model(str(gguf[0]), cache_dir=tmp_path).path == copy
    assert f"{copy} is damaged" in capsys.readouterr().err
    assert {path.name: path.stat().st_size for path in copy.iterdir()} == {
        path.name: path.stat().st_size for path in folder.iterdir()
    }
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_two_repairs_at_once_leave_one_whole_folder(
    gguf: tuple[Path, torch.Tensor], folder: Path, tmp_path: Path
) -> None:
    """Both see the damage before either repairs it; the second keeps what the first has published."""
    (tmp_path / "models").mkdir()
    copy = tmp_path / "models" / f"m-{'0' * 16}-v3"
    shutil.copytree(folder, copy)
    truncate_weights(copy)
    both_saw_it = threading.Barrier(2, timeout=60)
    one_at_a_time = threading.Lock()  # transformers' lazy imports are not for threads
    published: list[int] = []

    def repair() -> None:
        def fetch(_: Path) -> Path:
            both_saw_it.wait()
            one_at_a_time.acquire()
            return gguf[0]

        try:
            result = converted_folder(fetch, sha256="0" * 64, label="m", cache_dir=tmp_path, report=lambda _: None)
            published.append((result / "model.safetensors").stat().st_ino)
        finally:
            one_at_a_time.release()

    threads = [threading.Thread(target=repair) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(published) == 2
    assert published[0] == published[1]
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


def test_result_of_an_older_conversion_is_removed(
    gguf: tuple[Path, torch.Tensor], folder: Path, tmp_path: Path
) -> None:
    old, other = tmp_path / "models" / folder.name.replace("-v3", "-v1"), tmp_path / "models" / "other-0-v1"
    for path in (old, other):
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
    resolve_model(str(gguf[0]), cache_dir=tmp_path)
    assert {path.name for path in (tmp_path / "models").iterdir()} == {folder.name, "other-0-v1"}


def test_leftovers_of_a_killed_conversion_are_removed_later(gguf: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    old, young = tmp_path / "models" / ".partial-old", tmp_path / "models" / ".partial-young"
    for leftover in (old, young):
        leftover.mkdir(parents=True)
    past = time.time() - STALE_AFTER_S - 60
    os.utime(old, (past, past))
    resolve_model(str(gguf[0]), cache_dir=tmp_path)
    assert not old.exists()
    assert young.exists()
