"""Exported drafters are whole, draft as before, and their files are of the kind that published savers write."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_cases import (
    CPU,
    DEEPSPEC,
    FIXTURES,
    SPECULATORS,
    PagedContext,
    change_config,
    change_tensors,
    copy_checkpoint,
    load,
    make_config,
    make_tensors,
    tiny_target,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dspark.cli import main
from dspark.errors import CheckpointError, ConfigError
from dspark.models.drafter import Drafter
from dspark.models.drafter_attention import DraftRow
from dspark.models.drafter_checkpoint import load_drafter_checkpoint, save_drafter
from dspark.models.drafter_export import Export, export_drafter
from dspark.models.drafter_formats import drafter_config_from

PAGES = [9, 2, 30, 7, 0, 21, 5, 13, 40, 3, 11, 28]
# What savers write beside the drafter's own settings: tokens and defaults of the configuration class.
THEIRS = {"bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache", "auto_map"}


@pytest.fixture
def target(tmp_path: Path) -> str:
    """The tiny target with a tokenizer of as many ids as it has rows."""
    folder = tmp_path / "target"
    shutil.copytree(FIXTURES / "tiny_target", folder, ignore=shutil.ignore_patterns("case.*"))
    write_tokenizer(folder, 256)
    return str(folder)


def write_tokenizer(folder: Path, num_ids: int) -> None:
    vocabulary = {f"t{i}": i for i in range(num_ids)}
    Tokenizer(WordLevel(vocabulary, unk_token="t0")).save(str(folder / "tokenizer.json"))


def export(name: str | Path, output: Path, **settings: Any) -> Export:
    source = name if isinstance(name, Path) else FIXTURES / name
    return export_drafter(str(source), output, **settings)


def save(folder: Path, **changes: Any) -> Path:
    """Write a random drafter in the speculators layout."""
    config = make_config(**changes)
    save_drafter(folder, config, make_tensors(config), layout="speculators")
    return folder


def greedy_draft(drafter: Drafter) -> Any:
    context = PagedContext.of(drafter)
    taps = torch.randn((11, drafter.config.feature_size), generator=torch.Generator().manual_seed(1))
    context.write(taps, torch.arange(11), PAGES)
    return context.draft([DraftRow(anchor_token_id=17, anchor_position=11, page_ids=PAGES)])


def keys(folder: Path) -> tuple[set[str], set[str], set[str]]:
    """Return the keys of the configuration, of its layers, and of the tensors."""
    raw = json.loads((folder / "config.json").read_text())
    layers = raw.get("transformer_layer_config", {})
    return raw.keys() - THEIRS, layers.keys() - THEIRS, set(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("name", DEEPSPEC)
def test_a_drafter_survives_the_way_to_the_other_layout_and_back(name: str, target: str, tmp_path: Path) -> None:
    """The published files come back tensor by tensor, with the embedding and head that the way took from them."""
    export(name, tmp_path / "there", layout="speculators", target=target)
    export(tmp_path / "there", tmp_path / "back", layout="deepspec")
    stored, back = (load_file(folder / "model.safetensors") for folder in (FIXTURES / name, tmp_path / "back"))
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[key], stored[key]) and back[key].dtype == stored[key].dtype for key in stored)
    expected = greedy_draft(load(FIXTURES / name))
    for folder in ("there", "back"):
        draft = greedy_draft(load(tmp_path / folder))
        assert torch.equal(draft.target_ids, expected.target_ids)
        if name != "deepspec_vanilla_bf16":  # its copies of the target's tables are rounded
            assert torch.equal(draft.logits, expected.logits)


@pytest.mark.parametrize("name", ["deepspec_vanilla", "deepspec_gated", "deepspec_dflash", "deepspec_dflash_noconf"])
def test_exported_deepspec_files_have_the_keys_of_published_ones(name: str, target: str, tmp_path: Path) -> None:
    export(name, tmp_path / "speculators", layout="speculators", target=target)
    export(tmp_path / "speculators", tmp_path / "out", layout="deepspec")
    assert keys(tmp_path / "out") == keys(FIXTURES / name)


@pytest.mark.parametrize("name", SPECULATORS)
def test_exported_speculators_files_have_the_keys_of_published_ones(name: str, target: str, tmp_path: Path) -> None:
    export(name, tmp_path / "out", layout="speculators", target=target)
    written, published = keys(tmp_path / "out"), keys(FIXTURES / name)
    assert written[0] == published[0]
    assert published[1] - written[1] == set()
    assert written[2] == published[2]


def test_the_convention_of_the_slots_is_exported(target: str, tmp_path: Path) -> None:
    """Case I5: fill-in proposes one token fewer than it has slots, in the file and in what other engines are told."""
    fill_in = export("speculators_fill_in", tmp_path / "fill-in", layout="speculators", target=target)
    anchor = export("deepspec_vanilla", tmp_path / "anchor", layout="speculators", target=target)
    for exported, block_size, samples_from_anchor in ((fill_in, 8, False), (anchor, 7, True)):
        raw = json.loads((exported.folder / "config.json").read_text())
        method = raw["speculators_config"]["proposal_methods"][0]
        assert (raw["block_size"], raw["sample_from_anchor"]) == (block_size, samples_from_anchor)
        assert method["speculative_tokens"] == exported.config.num_draft_tokens == 7
        assert '"num_speculative_tokens": 7' in exported.vllm_command


@pytest.mark.parametrize(
    ("name", "what"), [("speculators_fill_in", "fill-in"), ("speculators_anchor_window", "sliding windows")]
)
def test_what_deepspec_cannot_express_is_refused_before_the_target_is_read(
    name: str, what: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"deepspec layout cannot express .*{what}"):
        export(name, tmp_path / "out", layout="deepspec", target="no/such-model")
    assert not list(tmp_path.iterdir())


def test_a_pruned_vocabulary_needs_expanding_for_deepspec(tmp_path: Path, target: str) -> None:
    save(tmp_path / "drafter", draft_vocab_size=100)
    message = (
        r"cannot express a pruned vocabulary \(100 of 256 ids\); add --expand-vocabulary.*or .* speculators layout"
    )
    with pytest.raises(ConfigError, match=message):
        export(tmp_path / "drafter", tmp_path / "out", layout="deepspec", target=target)


@pytest.mark.parametrize("layout", ["deepspec", "speculators"])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_an_expanded_drafter_says_the_same_of_the_ids_it_was_trained_for(
    head: str, layout: str, target: str, tmp_path: Path
) -> None:
    """Case I4: kept ids have the logits of the pruned drafter; the others the target's head row and no bias."""
    folder = save(tmp_path / "drafter", draft_vocab_size=100, markov_head_type=head)
    if layout == "speculators":  # whose files leave a whole head to the target
        change_tensors(folder, lambda tensors: tensors["lm_head.weight"].copy_(tiny_target().head_weight()[0:200:2]))
    exported = export(folder, tmp_path / "out", layout=layout, target=target, expand_vocabulary=True)
    pruned, full = load(folder), load(tmp_path / "out")
    assert not full.config.has_pruned_vocab
    assert {"d2t", "t2d"}.isdisjoint(load_file(tmp_path / "out" / "model.safetensors"))
    kept = torch.arange(0, 200, 2)
    others = torch.tensor(sorted(set(range(256)) - set(kept.tolist())))
    context = [PagedContext.of(drafter) for drafter in (pruned, full)]
    taps = torch.randn((11, pruned.config.feature_size), generator=torch.Generator().manual_seed(1))
    forced = torch.tensor([[3, 200, 7, 41, 255]])
    row = DraftRow(anchor_token_id=17, anchor_position=11, page_ids=PAGES)
    for one in context:
        one.write(taps, torch.arange(11), PAGES)
    expected, draft = (one.draft([row], forced) for one in context)
    assert torch.allclose(draft.logits[..., kept], expected.logits, atol=1e-5)
    base = draft.hidden @ tiny_target().head_weight()[others].T
    assert torch.allclose(draft.logits[..., others], base, atol=1e-4)
    assert torch.equal(draft.confidence_logits, expected.confidence_logits)
    assert exported.num_added_ids == 156
    assert exported.note is not None
    assert "expanded by 156 ids" in exported.note


def test_a_whole_vocabulary_cannot_be_expanded(target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not pruned \(256 of 256 ids\); leave out --expand-vocabulary"):
        export("deepspec_vanilla", tmp_path / "out", layout="deepspec", target=target, expand_vocabulary=True)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_a_table_of_its_own_is_not_lost_in_silence(name: str, target: str, tmp_path: Path) -> None:
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    change_tensors(folder, lambda tensors: tensors[name][7].add_(1.0))
    with pytest.raises(ConfigError, match=rf"{name} of the drafter is not the target's.*export in the deepspec layout"):
        export(folder, tmp_path / "out", layout="speculators", target=target)
    export(folder, tmp_path / "out", layout="deepspec", target=target)
    stored, written = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert torch.equal(written[name], stored[name])


def test_a_narrower_drafter_has_no_rows_to_expand_with(target: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter", draft_vocab_size=100, hidden_size=32)
    change_tensors(folder, lambda tensors: tensors.update({"embed_tokens.weight": torch.zeros(256, 32)}))
    with pytest.raises(ConfigError, match=r"hidden size \(32\) is not the target's \(64\)"):
        export(folder, tmp_path / "out", layout="speculators", target=target, expand_vocabulary=True)


def test_a_pruned_drafter_is_exported_as_it_is(target: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter", draft_vocab_size=100)
    exported = export(folder, tmp_path / "out", layout="speculators", target=target)
    stored, written = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert written.keys() == stored.keys()
    assert all(torch.equal(written[key], stored[key]) for key in stored)
    assert (exported.note, exported.num_added_ids) == (None, 0)


def test_the_head_of_a_pruned_drafter_can_be_left_to_the_target(target: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter", draft_vocab_size=100)
    ids = load_file(folder / "model.safetensors")["d2t"] + torch.arange(100)
    head = tiny_target().head_weight()[ids]
    change_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": head}))
    export(folder, tmp_path / "out", layout="speculators", target=target, without_head=True)
    stored, written = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert stored.keys() - written.keys() == {"lm_head.weight"}
    assert torch.equal(greedy_draft(load(tmp_path / "out")).logits, greedy_draft(load(folder)).logits)


def test_a_pruned_head_of_its_own_is_not_left_out(target: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "drafter", draft_vocab_size=100)
    with pytest.raises(ConfigError, match=r"lm_head.weight of the drafter is not the target's"):
        export(folder, tmp_path / "out", layout="speculators", target=target, without_head=True)


@pytest.mark.parametrize(("name", "layout"), [("speculators_anchor", "deepspec"), ("deepspec_vanilla", "speculators")])
def test_only_a_pruned_head_can_be_left_out(name: str, layout: str, target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--without-head leaves out the head of a pruned vocabulary"):
        export(name, tmp_path / "out", layout=layout, target=target, without_head=True)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("keep", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_weights_keep_their_type_or_get_another(dtype: str, expected: torch.dtype, target: str, tmp_path: Path) -> None:
    export("deepspec_vanilla_bf16", tmp_path / "out", layout="deepspec", target=target, dtype=dtype)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {expected}
    stored = load_file(FIXTURES / "deepspec_vanilla_bf16" / "model.safetensors")
    assert all(torch.equal(written[key], stored[key].to(expected)) for key in stored)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(expected).removeprefix("torch.")


def test_weights_that_a_type_cannot_hold_are_refused(target: str, tmp_path: Path) -> None:
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    change_tensors(folder, lambda tensors: tensors["norm.weight"].mul_(1e6))
    with pytest.raises(CheckpointError, match=r"norm\.weight holds values that are not finite as float16"):
        export(folder, tmp_path / "out", layout="deepspec", target=target, dtype="float16")
    assert not (tmp_path / "out").exists()


def test_an_unknown_type_is_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype \('int8'\) must be one of keep, float32"):
        export("deepspec_vanilla", tmp_path / "out", layout="deepspec", target=target, dtype="int8")


def test_the_commands_serve_it_elsewhere(target: str, tmp_path: Path) -> None:
    exported = export("deepspec_vanilla", tmp_path / "my drafter", layout="deepspec", target=target)
    vllm, sglang = shlex.split(exported.vllm_command), shlex.split(exported.sglang_command)
    assert vllm[:4] == ["vllm", "serve", str(Path(target).resolve()), "--speculative-config"]
    assert json.loads(vllm[4]) == {
        "method": "dspark",
        "model": str((tmp_path / "my drafter").resolve()),
        "num_speculative_tokens": 7,
        "draft_sample_method": "probabilistic",
        "enable_adaptive_verification": True,
    }
    assert sglang == [
        *("python", "-m", "sglang.launch_server", "--model-path", str(Path(target).resolve())),
        *("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", vllm_model(vllm)),
    ]


def vllm_model(command: list[str]) -> str:
    model = json.loads(command[4])["model"]
    assert isinstance(model, str)
    return model


def test_without_a_confidence_head_the_verification_does_not_adapt(target: str, tmp_path: Path) -> None:
    exported = export("deepspec_dflash_noconf", tmp_path / "out", layout="deepspec", target=target)
    assert "enable_adaptive_verification" not in exported.vllm_command


def test_a_hub_id_in_the_files_is_used_as_it_stands(tmp_path: Path) -> None:
    """Nothing is taken from the target, so it is neither read nor downloaded."""
    folder = save(tmp_path / "drafter", target_name="org/target", target_architecture="LlamaForCausalLM")
    exported = export(folder, tmp_path / "out", layout="speculators")
    assert exported.vllm_command.startswith("vllm serve org/target ")
    config = drafter_config_from(tmp_path / "out")
    assert (config.target_name, config.target_architecture) == ("org/target", "LlamaForCausalLM")


def test_the_target_is_recorded(target: str, tmp_path: Path) -> None:
    (Path(target) / "model.safetensors").unlink()  # its weights are not needed for that
    export("speculators_anchor", tmp_path / "out", layout="speculators", target=target)
    config = drafter_config_from(tmp_path / "out")
    assert (config.target_name, config.target_architecture) == (target, "Qwen3ForCausalLM")


def test_a_target_that_nobody_names_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not say which model it was made for; name that model \(--target\)"):
        export("deepspec_vanilla", tmp_path / "out", layout="speculators")


@pytest.mark.parametrize(
    ("changes", "num_ids", "message"),
    [
        ({"num_hidden_layers": 5, "layer_types": None}, 256, "made for a target of 6 layers, this target has 5"),
        ({}, 300, "vocabulary has 256 rows, the target's tokenizer has 300 ids"),
    ],
)
def test_the_drafter_of_another_target_is_refused(
    changes: dict[str, Any], num_ids: int, message: str, target: str, tmp_path: Path
) -> None:
    change_config(Path(target), **changes)
    write_tokenizer(Path(target), num_ids)
    with pytest.raises(CheckpointError, match=message):
        export("deepspec_vanilla", tmp_path / "out", layout="speculators", target=target)


def test_a_target_with_more_padding_is_no_other_target(target: str, tmp_path: Path) -> None:
    """Case I3: 264 rows beside the drafter's 256, of which the tokenizer uses 250; the padding is not stored."""
    change_config(Path(target), vocab_size=264)
    weights = load_file(Path(target) / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], torch.full((8, 64), 9.0)])
    save_file(weights, Path(target) / "model.safetensors")
    write_tokenizer(Path(target), 250)
    export("deepspec_gated", tmp_path / "there", layout="speculators", target=target)
    export(tmp_path / "there", tmp_path / "back", layout="deepspec")
    stored, back = (load_file(f / "model.safetensors") for f in (FIXTURES / "deepspec_gated", tmp_path / "back"))
    assert all(torch.equal(back[key], stored[key]) for key in stored)


def test_a_target_with_less_padding_leaves_no_id_to_propose_that_it_lacks(target: str, tmp_path: Path) -> None:
    """Case I1: rows 240 to 255 of the drafter would stand for no row of the target; they are cut off."""
    folder = save(tmp_path / "drafter")
    change_config(Path(target), vocab_size=240)
    weights = load_file(Path(target) / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:240].clone()
    save_file(weights, Path(target) / "model.safetensors")
    write_tokenizer(Path(target), 240)
    change_config(folder, mask_token_id=239)
    export(folder, tmp_path / "out", layout="deepspec", target=target)
    written = load_file(tmp_path / "out" / "model.safetensors")
    vocabulary = (
        "embed_tokens.weight",
        "lm_head.weight",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
    )
    assert {written[name].shape[0] for name in vocabulary} == {240}
    assert drafter_config_from(tmp_path / "out").vocab_size == 240


@pytest.mark.parametrize("name", ["fc.weight", "markov_head.markov_w2.weight", "confidence_head.proj.bias"])
def test_a_drafter_with_a_missing_tensor_is_not_exported(name: str, target: str, tmp_path: Path) -> None:
    """Case I8."""
    folder = copy_checkpoint("deepspec_gated", tmp_path / "drafter")
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"tensor {name} is missing"):
        export(folder, tmp_path / "out", layout="speculators", target=target)
    assert not (tmp_path / "out").exists()


def test_calibration_goes_with_the_drafter(target: str, tmp_path: Path) -> None:
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    (folder / "sts.json").write_text(json.dumps({"temperatures": [1.5] * 7, "dataset": "x"}))
    exported = export(folder, tmp_path / "out", layout="speculators", target=target)
    assert (tmp_path / "out" / "sts.json").read_bytes() == (folder / "sts.json").read_bytes()
    flag = f"--speculative-dspark-confidence-sts-path {exported.folder / 'sts.json'}"
    assert exported.sglang_command.endswith(flag)


@pytest.mark.parametrize("temperatures", [None, [1.0] * 6])
def test_calibration_of_another_drafter_is_refused(temperatures: Any, target: str, tmp_path: Path) -> None:
    folder = copy_checkpoint("deepspec_vanilla", tmp_path / "drafter")
    (folder / "sts.json").write_text(json.dumps({"temperatures": temperatures}))
    with pytest.raises(CheckpointError, match=r"temperatures .*sts\.json must be a list of 7 numbers from"):
        export(folder, tmp_path / "out", layout="speculators", target=target)


def test_a_layout_that_the_file_gets_wrong_can_be_named(target: str, tmp_path: Path) -> None:
    export("deepspec_vanilla", tmp_path / "out", layout="speculators", target=target, source_layout="speculators")
    checkpoint = load_drafter_checkpoint(tmp_path / "out", dtype=torch.float32, device=CPU)
    assert (checkpoint.config.tap_ids, checkpoint.config.samples_from_anchor) == ((-1, 1, 3), False)


def test_the_verb_prints_the_folder_and_the_commands(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "drafter", draft_vocab_size=100)
    argv = ["export", str(folder), "--layout", "deepspec", "--output", str(tmp_path / "out"), "--target", target]
    assert main(argv) == 2
    assert "add --expand-vocabulary" in capsys.readouterr().err
    assert main([*argv, "--expand-vocabulary", "--dtype", "bfloat16"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{(tmp_path / 'out').resolve()}\n\nvLLM:\nvllm serve ")
    assert "\n\nSGLang:\npython -m sglang.launch_server " in out
    assert err.startswith("dspark: note: the vocabulary was expanded by 156 ids")
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    assert main([*argv, "--expand-vocabulary"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_the_verb_gives_no_commands_for_files_that_only_this_package_completes(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save(tmp_path / "drafter", draft_vocab_size=100)
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    argv = ["export", str(folder), "--layout", "speculators", "--without-head", "--target", target]
    assert main([*argv, "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{(tmp_path / 'out').resolve()}\n"
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
