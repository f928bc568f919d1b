"""A DSpark drafter named in the settings: found, checked against its target, and given its share of memory."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch
from drafter_cases import FIXTURES, change_config, copy_checkpoint, make_config
from tiny_models import make_model
from toys import WordTokenizer

from dspark import LLM, SamplingParams
from dspark.cli import build_parser
from dspark.cli_engine import engine_config
from dspark.config import EngineConfig, SpeculationConfig
from dspark.engine import build
from dspark.engine.build import LoadedModel, build_engine, load_engine, load_model
from dspark.errors import CheckpointError, ConfigError
from dspark.evaluation.prompts import load_prompts
from dspark.models import shipped_drafters
from dspark.models.drafter_checkpoint import drafter_shapes, save_drafter

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(FIXTURES / "tiny_target" / name, folder)
    WordTokenizer(256).backend.save(str(folder / "tokenizer.json"))
    return folder


def other_target(folder, *, num_ids=256, **changes):
    """Save a Llama of six layers with a tokenizer of its size."""
    model = make_model("llama", vocab_size=num_ids, num_hidden_layers=6, eos_token_id=None, **changes)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    WordTokenizer(num_ids).backend.save(str(folder / "tokenizer.json"))
    return folder


def config_for(target_folder, drafter, **speculation) -> EngineConfig:
    # Every draft is verified: with these tiny targets drafting never pays, and the planner would say so.
    settings = SpeculationConfig(**{"scheduler": "fixed", **speculation})
    return EngineConfig(model=str(target_folder), drafter=str(drafter), speculation=settings, num_threads=1)


@pytest.mark.parametrize("name", ["deepspec_vanilla", "deepspec_dflash_noconf", "speculators_fill_in"])
def test_a_drafter_of_either_layout_drafts_without_changing_the_text(target_folder, name):
    plain = LLM(str(target_folder), drafter="none").generate([[5, 6, 7]], PARAMS, show_progress=False)[0]
    llm = LLM.from_engine(load_engine(config_for(target_folder, FIXTURES / name)))
    drafted = llm.generate([[5, 6, 7]], PARAMS, show_progress=False)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculation.num_drafted > 40
    assert (
        llm.engine.metrics.registry.get_sample_value(
            "dspark:drafter_failures_total", {"model_name": llm.engine.model_name}
        )
        == 0
    )


def test_a_longer_draft_than_trained_is_refused_at_start(target_folder):
    """I6."""
    with pytest.raises(ConfigError, match=r"num_draft_tokens \(8\) .* the drafter's trained length \(7\)"):
        load_engine(config_for(target_folder, FIXTURES / "deepspec_vanilla", num_draft_tokens=8))


@pytest.mark.parametrize("num_draft_tokens", [0, 7])
def test_the_trained_length_and_plain_decoding_are_not_refused(target_folder, num_draft_tokens):
    load_engine(config_for(target_folder, FIXTURES / "deepspec_vanilla", num_draft_tokens=num_draft_tokens))


def test_a_drafter_for_another_hidden_size_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"hidden size 64, this target has 48; use the drafter of this target"):
        load_engine(config_for(other_target(tmp_path), FIXTURES / "deepspec_vanilla"))


def test_a_drafter_for_a_smaller_vocabulary_is_refused(tmp_path):
    """I2."""
    folder = other_target(tmp_path, num_ids=300, hidden_size=64, num_attention_heads=4)
    with pytest.raises(CheckpointError, match=r"vocabulary has 256 rows, the target's tokenizer has 300 ids"):
        load_engine(config_for(folder, FIXTURES / "deepspec_vanilla"))


def test_an_unsupported_drafter_is_named_rather_than_taken_for_a_model(target_folder, tmp_path):
    drafter = copy_checkpoint("speculators_anchor", tmp_path / "drafter")
    change_config(drafter, speculators_model_type="eagle3")
    with pytest.raises(CheckpointError, match=r"unsupported speculators_model_type \('eagle3'\)"):
        load_engine(config_for(target_folder, drafter))


def test_the_layout_flag_overrides_what_the_files_say(target_folder):
    """The same ids name other layers in the other layout."""
    argv = ["serve", "--model", str(target_folder), "--drafter", str(FIXTURES / "deepspec_vanilla")]
    taps = [
        load_engine(engine_config(build_parser().parse_args(argv + more))).drafting.proposer.tapped_layers
        for more in ([], ["--drafter-layout", "deepspec"], ["--drafter-layout", "speculators"])
    ]
    assert taps == [(0, 2, 4), (0, 2, 4), (-1, 1, 3)]


def test_an_unknown_layout_is_refused():
    with pytest.raises(ConfigError, match=r"drafter_layout \('specforge'\) must be one of auto, deepspec, speculators"):
        SpeculationConfig(drafter_layout="specforge")


def test_the_default_cache_keeps_to_its_bytes_with_the_drafters_pool_counted(target_folder, monkeypatch):
    """The target's six layers and the drafter's two have equal heads."""
    raw = json.loads((FIXTURES / "deepspec_vanilla" / "config.json").read_text())
    assert (raw["num_hidden_layers"], raw["num_key_value_heads"], raw["head_dim"]) == (2, 2, 16)
    bytes_per_layer = 2 * 2 * 16 * 4  # keys and values, key heads, head size, float32
    monkeypatch.setattr(build, "DEFAULT_CACHE_BYTES", 16 * 24 * bytes_per_layer)
    alone = load_engine(replace(config_for(target_folder, "none"), drafter="none"))
    with_drafter = load_engine(config_for(target_folder, FIXTURES / "deepspec_vanilla"))
    assert (alone.allocator.num_pages, with_drafter.allocator.num_pages) == (4, 3)


# -- together with n-gram, and drafters that ship ------------------------------------------------------------------


def text_of(target_folder, drafter) -> list[int]:
    llm = LLM.from_engine(load_engine(config_for(target_folder, drafter)))
    return llm.generate([[5, 6, 7, 5, 6, 7, 5, 6]], PARAMS, show_progress=False)[0].token_ids


def test_a_drafter_with_ngram_changes_no_text(target_folder):
    plain = text_of(target_folder, "none")
    for name in ("deepspec_vanilla", "deepspec_dflash_noconf"):
        assert text_of(target_folder, f"{FIXTURES / name}+ngram") == plain


def test_a_smaller_model_goes_with_ngram_too(target_folder):
    engine = load_engine(config_for(target_folder, f"{target_folder}+ngram"))
    assert engine.drafting.proposer.name == "draft_model+ngram"
    assert text_of(target_folder, f"{target_folder}+ngram") == text_of(target_folder, "none")


@pytest.mark.parametrize(
    ("drafter", "name"), [("deepspec_vanilla", "dspark"), ("deepspec_vanilla+ngram", "dspark+ngram")]
)
def test_the_suffix_decides_whether_ngram_drafts_too(target_folder, drafter, name):
    engine = load_engine(config_for(target_folder, FIXTURES / drafter))
    assert engine.drafting.proposer.name == name
    assert engine.drafting.proposer.tapped_layers == (0, 2, 4)
    assert engine.drafting.num_draft_tokens == 7


def test_a_drafter_without_a_confidence_head_is_reported_at_start(target_folder, caplog):
    """I8."""
    with caplog.at_level(logging.INFO):
        load_engine(config_for(target_folder, FIXTURES / "deepspec_vanilla"))
        assert "confidence" not in caplog.text
        load_engine(config_for(target_folder, f"{FIXTURES / 'deepspec_dflash_noconf'}+ngram"))
    assert caplog.text.count("has no confidence head: confidence scheduling is not available") == 1


@pytest.fixture
def shipping(tmp_path, monkeypatch):
    """A package that ships a drafter for a model of this identity; return the identity."""
    copy_checkpoint("deepspec_vanilla", tmp_path / "package" / "tiny")
    monkeypatch.setattr(shipped_drafters, "SHIPPED_FOLDER", tmp_path / "package")
    monkeypatch.setattr(shipped_drafters, "SHIPPED_DRAFTERS", {"identity of tiny": "tiny"})
    return "identity of tiny"


def model_called(target_folder, identity) -> LoadedModel:
    config = config_for(target_folder, "none")
    model = load_model(str(target_folder), config)
    return replace(model, folder=replace(model.folder, name="tiny", gguf_sha256=identity))


@pytest.mark.parametrize(
    ("drafter", "name"), [("auto", "dspark+ngram"), ("dspark", "dspark"), ("dspark+ngram", "dspark+ngram")]
)
def test_the_model_a_drafter_ships_for_gets_it(target_folder, shipping, drafter, name):
    engine = build_engine(model_called(target_folder, shipping), config_for(target_folder, drafter))
    assert engine.drafting.proposer.name == name


def test_a_model_of_the_same_name_and_other_weights_gets_ngram_and_no_shipped_drafter(target_folder, shipping, caplog):
    model = model_called(target_folder, None)
    with caplog.at_level(logging.INFO):
        assert build_engine(model, config_for(target_folder, "auto")).drafting.proposer.name == "ngram"
    assert "no drafter ships for tiny: n-gram drafts are used" in caplog.text
    with pytest.raises(ConfigError, match="no drafter ships for the model 'tiny'"):
        build_engine(model, config_for(target_folder, "dspark"))


def test_a_damaged_shipped_drafter_is_an_error_and_not_silently_ngram(target_folder, shipping):
    folder = shipped_drafters.SHIPPED_FOLDER / "tiny"
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        build_engine(model_called(target_folder, shipping), config_for(target_folder, "auto"))


@pytest.mark.embedded
def test_an_untrained_drafter_of_the_embedded_model_changes_no_text_and_is_reported(tmp_path, caplog):
    config = make_config(
        hidden_size=576, target_hidden_size=576, vocab_size=49152, draft_vocab_size=49152, num_heads=9,
        num_kv_heads=3, head_dim=64, max_position=8192, tap_ids=(5, 20), num_target_layers=30,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(s, generator=generator) * 0.02 for name, s in sorted(drafter_shapes(config).items())}
    save_drafter(tmp_path / "drafter", config, tensors, layout="speculators")
    prompts = [record.turns[0] for record in load_prompts("mixed")[:12]]
    params = SamplingParams(temperature=0, max_tokens=22, ignore_eos=True)
    texts = []
    with caplog.at_level(logging.WARNING):
        for drafter in ("none", str(tmp_path / "drafter")):
            llm = LLM(
                "smollm2-135m", drafter=drafter, speculation=SpeculationConfig(num_draft_tokens=1, scheduler="fixed")
            )
            completions = llm.generate(prompts, params, show_progress=False)
            texts.append([c.token_ids for c in completions])
    assert texts[0] == texts[1]
    assert sum(c.speculation.num_verified for c in completions) > 200
    assert sum(c.speculation.num_accepted for c in completions) < 5
    assert caplog.text.count("the dspark drafter is of no use here") == 1
