"""From settings to an engine: what does not fit is refused at start, memory stays within its share."""

from __future__ import annotations

import json
import shutil

import pytest
from byte_tokenizers import byte_level_backend
from tiny_models import make_model

from dspark import LLM, SamplingParams
from dspark.config import CacheConfig, EngineConfig
from dspark.engine import build
from dspark.engine.build import load_engine
from dspark.errors import CheckpointError, ConfigError

NUM_IDS = byte_level_backend().get_vocab_size()


def save_model(folder, vocab_size=NUM_IDS, **changes):
    make_model("llama", vocab_size=vocab_size, eos_token_id=None, **changes).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    byte_level_backend().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("target"))


def test_an_end_token_outside_the_embedding_is_refused(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5000]}))
    with pytest.raises(CheckpointError, match=r"eos_token_id 5000 in .* is no row of the embedding"):
        load_engine(EngineConfig(model=str(folder)))


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(tmp_path):
    folder = save_model(tmp_path, vocab_size=100)
    with pytest.raises(CheckpointError, match="the embedding has 100 rows"):
        load_engine(EngineConfig(model=str(folder)))


def test_padding_rows_beyond_the_tokenizer_are_fine(tmp_path):
    """I3"""
    folder = save_model(tmp_path, vocab_size=NUM_IDS + 8)
    (completion,) = LLM(str(folder)).generate("ab", SamplingParams(temperature=0, max_tokens=3), show_progress=False)
    assert len(completion.token_ids) == 3


def test_a_drafter_of_another_vocabulary_is_refused_with_both_sizes(model_folder, tmp_path):
    """I2: the same size, permuted."""
    folder = shutil.copytree(model_folder, tmp_path / "drafter")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[65:67]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=rf"{NUM_IDS} tokens.*token id"):
        load_engine(EngineConfig(model=str(model_folder), drafter=str(folder)))


def test_a_smaller_model_drafts_without_changing_the_text(model_folder, tmp_path):
    folder = save_model(tmp_path, num_hidden_layers=1)
    params = SamplingParams(temperature=0, max_tokens=20)
    texts = [
        LLM(str(model_folder), drafter=drafter).generate("hello", params, show_progress=False)[0].token_ids
        for drafter in ("none", str(folder), str(model_folder))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_a_context_beyond_the_models_is_refused(model_folder):
    with pytest.raises(ConfigError, match=r"max_model_len \(500\) exceeds what the model was made for \(256\)"):
        load_engine(EngineConfig(model=str(model_folder), max_model_len=500))


def test_a_cache_below_the_context_limits_requests_and_says_so(model_folder, caplog):
    engine = load_engine(EngineConfig(model=str(model_folder), cache=CacheConfig(num_tokens=64)))
    assert engine.max_model_len == 64
    assert "requests are limited to 64 tokens instead of 256" in caplog.text


def test_the_default_cache_keeps_to_its_bytes_with_the_drafters_pool_counted(model_folder, monkeypatch):
    bytes_per_token = 2 * 3 * 2 * 8 * 4  # keys and values, layers, key heads, head size, float32
    monkeypatch.setattr(build, "DEFAULT_CACHE_BYTES", 160 * bytes_per_token)
    alone = load_engine(EngineConfig(model=str(model_folder), drafter="none"))
    with_drafter = load_engine(EngineConfig(model=str(model_folder), drafter=str(model_folder)))
    assert (alone.allocator.num_pages, with_drafter.allocator.num_pages) == (10, 5)
    assert (alone.max_model_len, with_drafter.max_model_len) == (160, 80)


def test_without_parameters_the_models_recommendations_apply(model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    assert LLM(str(folder)).default_sampling_params() == SamplingParams(temperature=0.6, top_k=20)
    assert LLM(str(model_folder)).default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", 7), ("top_k", -9), ("min_p", 3)])
def test_recommendations_out_of_range_are_refused_at_start(model_folder, tmp_path, name, value):
    folder = shutil.copytree(model_folder, tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(CheckpointError, match=rf"generation_config.json in .*: {name} \({value}"):
        load_engine(EngineConfig(model=str(folder)))


@pytest.mark.parametrize("cache", [CacheConfig(num_tokens=10**13), CacheConfig(page_size=10**13)])
def test_a_cache_beyond_the_machines_memory_is_refused(model_folder, cache):
    with pytest.raises(ConfigError, match="but this machine has"):
        load_engine(EngineConfig(model=str(model_folder), cache=cache))


def test_a_device_that_holds_no_numbers_is_refused(model_folder):
    with pytest.raises(ConfigError, match=r"device \('meta'\) cannot be used here"):
        load_engine(EngineConfig(model=str(model_folder), device="meta"))


def test_the_gauges_tell_the_bandwidth_reached_and_the_machines_best(model_folder):
    engine = load_engine(EngineConfig(model=str(model_folder), drafter="none"))
    LLM.from_engine(engine).generate("hello", SamplingParams(temperature=0, max_tokens=3), show_progress=False)
    labels = {"model_name": engine.model_name}
    names = ("dspark:memory_bandwidth_bytes_per_second", "dspark:memory_bandwidth_peak_bytes_per_second")
    reached, peak = (engine.metrics.registry.get_sample_value(name, labels) for name in names)
    assert reached is not None and peak is not None
    assert reached > 0 and peak > 1e8
