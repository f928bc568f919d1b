"""Target features: equal to the decoder's, whatever the packing; the cache on disk, its size, its refusals."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import CPU, conversation

from dspark.batch import BatchRow, build_forward_batch
from dspark.config import EngineConfig
from dspark.errors import CheckpointError, ConfigError
from dspark.models.decoder import Decoder
from dspark.models.kv_cache import KVCache
from dspark.training.dataset import Conversation
from dspark.training.feature_cache import FeatureCache
from dspark.training.features import Features, OnlineFeatures, check_delivered

TAPS = (-1, 2)
CONVERSATIONS = [conversation([(7 * n + i) % 250 for i in range(9 + 5 * n)], 4, n) for n in range(4)]
IDENTITY = {"data": "d", "target": "t", "tokenizer": "k", "chat template": "c", "tapped layers": "-1,2", "seed": "0"}


def online(decoder: Decoder, chunk_tokens: int = 512) -> OnlineFeatures:
    return OnlineFeatures(decoder, TAPS, chunk_tokens=chunk_tokens)


def make_cache(folder: Path, **changes: Any) -> FeatureCache:
    options: dict[str, Any] = {"tap_width": 64, "hidden_size": 32, "dtype": "float16", "identity": IDENTITY}
    return FeatureCache(folder, CONVERSATIONS, **options | changes)


@torch.inference_mode()
def served_features(decoder: Decoder, ids: Sequence[int], chunks: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the decoder as the engine does: other pages, prefill in `chunks`."""
    size = EngineConfig().cache.page_size
    kv_cache = KVCache(decoder.config, 16, size, decoder.dtype, CPU)
    pages, start, hidden, taps = [5, 2, 9, 1, 7, 12], 0, [], []
    for length in chunks:
        row = BatchRow(token_ids=ids[start : start + length], start_position=start, page_ids=pages)
        got, tapped = decoder(build_forward_batch([row], page_size=size), kv_cache, tapped_layers=TAPS)
        assert tapped is not None
        hidden.append(got)
        taps.append(tapped)
        start += length
    return torch.cat(hidden), torch.cat(taps)


@pytest.mark.parametrize("chunk_tokens", [512, 10])
def test_features_equal_those_of_serving_bit_for_bit(decoder: Decoder, chunk_tokens: int) -> None:
    one = CONVERSATIONS[3]
    (got,) = online(decoder, chunk_tokens)([one])
    chunks = [24] if chunk_tokens == 512 else [10, 10, 4]
    hidden, taps = served_features(decoder, one.token_ids.tolist(), chunks)
    assert got.final_hidden is not None
    assert torch.equal(got.final_hidden, hidden)
    assert torch.equal(got.taps, taps)


def test_conversations_packed_into_a_pass_do_not_meet(decoder: Decoder) -> None:
    packed = online(decoder)(CONVERSATIONS)
    for one, features in zip(CONVERSATIONS, packed, strict=True):
        (alone,) = online(decoder)([one])
        torch.testing.assert_close(features.taps, alone.taps, rtol=1e-4, atol=1e-5)


def test_features_can_be_used_in_a_backward_pass(decoder: Decoder) -> None:
    (features,) = online(decoder)(CONVERSATIONS[:1])
    weight = torch.ones(64, requires_grad=True)
    (features.taps * weight).sum().backward()
    assert weight.grad is not None


def test_missing_final_hidden_states_are_refused_where_a_term_needs_them() -> None:
    """Case M7."""
    features = [Features(taps=torch.zeros(3, 4), final_hidden=None)]
    check_delivered(features, needs_target_probs=False)
    with pytest.raises(ConfigError, match="delivers no final hidden states"):
        check_delivered(features, needs_target_probs=True)


def test_the_cache_gives_back_the_features_in_16_bits(tmp_path: Path, decoder: Decoder) -> None:
    cache = make_cache(tmp_path / "cache")
    cache.fill(online(decoder))
    for got, expected in zip(cache(CONVERSATIONS[::-1]), online(decoder)(CONVERSATIONS)[::-1], strict=True):
        assert got.final_hidden is not None and expected.final_hidden is not None
        torch.testing.assert_close(got.taps, expected.taps.half().float(), rtol=2e-3, atol=1e-4)
        torch.testing.assert_close(got.final_hidden, expected.final_hidden, rtol=2e-3, atol=1e-3)


def test_the_size_estimate_is_within_five_percent(tmp_path: Path, decoder: Decoder) -> None:
    """Case M6."""
    cache = make_cache(tmp_path / "cache")
    estimate = cache.num_bytes
    cache.fill(online(decoder))
    real = sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    assert real == pytest.approx(estimate, rel=0.05)


def test_an_interrupted_cache_goes_on_and_ends_up_the_same(
    tmp_path: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.training.feature_cache._GROUP_TOKENS", 1)
    calls: list[int] = []

    def failing(conversations: Sequence[Conversation]) -> list[Features]:
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(conversations[0].index)
        return online(decoder)(conversations)

    with pytest.raises(KeyboardInterrupt):
        make_cache(tmp_path / "a").fill(failing)
    with (tmp_path / "a" / "features.bin").open("ab") as file:
        file.write(b"half a row")
    resumed = make_cache(tmp_path / "a")
    assert resumed.num_done == 2
    seen: list[int] = []

    def counting(conversations: Sequence[Conversation]) -> list[Features]:
        seen.extend(c.index for c in conversations)
        return online(decoder)(conversations)

    resumed.fill(counting)
    assert seen == [2, 3]
    make_cache(tmp_path / "b").fill(online(decoder))
    assert (tmp_path / "a" / "features.bin").read_bytes() == (tmp_path / "b" / "features.bin").read_bytes()


@pytest.mark.parametrize("name", ["data", "target", "tokenizer", "chat template", "tapped layers"])
def test_a_cache_of_something_else_is_refused_by_name(tmp_path: Path, decoder: Decoder, name: str) -> None:
    """Case M5."""
    make_cache(tmp_path / "cache").fill(online(decoder))
    with pytest.raises(ConfigError, match=f"made with other values of {name} "):
        make_cache(tmp_path / "cache", identity=IDENTITY | {name: "other"})


def test_another_shuffle_seed_uses_the_same_cache(tmp_path: Path, decoder: Decoder) -> None:
    make_cache(tmp_path / "cache").fill(online(decoder))
    assert make_cache(tmp_path / "cache", identity=IDENTITY | {"seed": "1"}).num_done == 4


def test_a_short_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case M6."""
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("dspark.training.feature_cache.shutil.disk_usage", lambda _: usage)
    cache = make_cache(tmp_path / "new" / "cache")
    with pytest.raises(ConfigError, match=r"the feature cache needs 0 MB more and .* has 0 MB free"):
        cache.check_space()
    assert not (tmp_path / "new").exists()


def test_features_beyond_float16_are_refused_with_advice(tmp_path: Path) -> None:
    def large(conversations: Sequence[Conversation]) -> list[Features]:
        return [
            Features(taps=torch.full((c.num_tokens, 64), 1e5), final_hidden=torch.zeros(c.num_tokens, 32))
            for c in conversations
        ]

    with pytest.raises(ConfigError, match=r"largest: 1e\+05\); set cache_dtype to bfloat16"):
        make_cache(tmp_path / "half").fill(large)
    wide = make_cache(tmp_path / "wide", dtype="bfloat16")
    wide.fill(large)
    assert float(wide(CONVERSATIONS[:1])[0].taps.max()) == pytest.approx(1e5, rel=1e-2)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cache.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cache\.json is damaged"):
        make_cache(tmp_path / "cache")


def test_stored_normalizers_are_those_of_the_cached_rows(tmp_path: Path, decoder: Decoder) -> None:
    cache = make_cache(tmp_path / "cache")
    cache.fill(online(decoder))
    (before,) = cache(CONVERSATIONS[2:3])
    assert before.log_normalizers is None
    cache.fill_log_normalizers(decoder.compute_logits)
    cache.open_log_normalizers()
    (got,) = cache(CONVERSATIONS[2:3])
    assert got.final_hidden is not None and got.log_normalizers is not None
    torch.testing.assert_close(got.log_normalizers, decoder.compute_logits(got.final_hidden).logsumexp(-1))


def test_interrupted_normalizers_go_on_at_whole_groups_and_end_up_the_same(
    tmp_path: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.training.feature_cache._GROUP_LOGITS", 8)
    caches = [make_cache(tmp_path / name) for name in ("a", "b")]
    for cache in caches:
        cache.fill(online(decoder))
        cache.fill_log_normalizers(decoder.compute_logits)
    path = tmp_path / "a" / "log_normalizers.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[: 4 * 19 + 2])  # two groups, three rows and half a number
    num_rows: list[int] = []

    def counting(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return decoder.compute_logits(hidden)

    caches[0].fill_log_normalizers(counting)
    assert path.read_bytes() == whole == (tmp_path / "b" / "log_normalizers.bin").read_bytes()
    assert sum(num_rows) == sum(c.num_tokens for c in CONVERSATIONS) - 16


def test_normalizers_of_rows_that_are_gone_are_computed_anew(tmp_path: Path, decoder: Decoder) -> None:
    cache = make_cache(tmp_path / "cache")
    cache.fill(online(decoder))
    cache.fill_log_normalizers(decoder.compute_logits)
    (tmp_path / "cache" / "cache.json").unlink()
    make_cache(tmp_path / "cache").fill(online(decoder))
    assert not (tmp_path / "cache" / "log_normalizers.bin").exists()


def test_complete_normalizers_are_left_alone(tmp_path: Path, decoder: Decoder) -> None:
    cache = make_cache(tmp_path / "cache")
    cache.fill(online(decoder))
    cache.fill_log_normalizers(decoder.compute_logits)

    def refuse(hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is missing")

    cache.fill_log_normalizers(refuse)
