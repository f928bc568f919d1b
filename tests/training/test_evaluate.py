"""Offline acceptance: exact on small numbers, equal to drafting over pages, high for an over-fitted drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_cases import PagedContext, make_config, make_tensors
from torch import Tensor
from training_cases import answer, conversation, read_log, settings, write_records

from dspark.cli import main
from dspark.errors import CheckpointError, ConfigError
from dspark.models.decoder import Decoder
from dspark.models.drafter import load_drafter
from dspark.models.drafter_attention import DraftRow
from dspark.models.drafter_module import DrafterModule
from dspark.speculation.calibration import ReliabilityBin
from dspark.speculation.round_counts import RoundCounts
from dspark.training.checkpoint import load_module
from dspark.training.dataset import Conversation
from dspark.training.evaluate import (
    Evaluation,
    evaluate,
    evaluate_drafter,
    expected_auc,
    to_json,
)
from dspark.training.features import Features, OnlineFeatures
from dspark.training.trainer import train

NUM_PROMPT = 5
ALL_ANCHORS = 1000


@pytest.fixture(scope="module")
def conversations(decoder: Decoder) -> list[Conversation]:
    """Eight greedy answers."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (NUM_PROMPT,), generator=generator).tolist() for _ in range(8)]
    return [
        conversation(prompt + answer(decoder, prompt, 24), NUM_PROMPT, index) for index, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def overfitted(
    target_folder: Path, conversations: list[Conversation], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A drafter trained on those eight alone."""
    folder = tmp_path_factory.mktemp("overfit")
    records = [
        {"prompt_ids": ids[:NUM_PROMPT], "response_ids": ids[NUM_PROMPT:]}
        for ids in (one.token_ids.tolist() for one in conversations)
    ]
    config = settings(
        target_folder,
        write_records(folder / "data.jsonl", records),
        folder / "out",
        num_anchors=ALL_ANCHORS,
        batch_size=8,
        max_steps=150,
        learning_rate=5e-3,
        save_interval=1000,
        draft_vocab_size=200,
        ce_weight=1.0,
    )
    return train(config, show_progress=False).checkpoint


def accepted_lengths(folder: Path, conversations: list[Conversation], decoder: Decoder) -> list[int]:
    """Draft greedily over pages at every anchor with a whole block after it; count tokens up to the first mismatch."""
    drafter = load_drafter(folder, decoder, tokenizer_size=262)
    size = drafter.config.num_draft_tokens
    lengths = []
    for one in conversations:
        (features,) = OnlineFeatures(decoder, drafter.config.tap_ids, chunk_tokens=512)([one])
        context, pages = PagedContext.of(drafter), list(range(20, 0, -1))
        context.write(features.taps, torch.arange(one.num_tokens), pages)
        ids = one.token_ids.tolist()
        anchors = range(NUM_PROMPT - 1, len(ids) - size)
        rows = [DraftRow(anchor_token_id=ids[n], anchor_position=n, page_ids=pages) for n in anchors]
        for n, drafted in zip(anchors, context.draft(rows).target_ids.tolist(), strict=True):
            matches = [token == true for token, true in zip(drafted, ids[n + 1 :], strict=False)]
            lengths.append(1 + (matches.index(False) if False in matches else size))
    return lengths


def test_an_overfitted_drafter_is_accepted_and_drafting_over_pages_accepts_as_much(
    overfitted: Path, conversations: list[Conversation], decoder: Decoder
) -> None:
    module = load_module(overfitted, decoder)
    features = OnlineFeatures(decoder, module.config.tap_ids, chunk_tokens=512)
    measured = evaluate_drafter(
        module, conversations, features, decoder.compute_logits, num_anchors=ALL_ANCHORS, pack_tokens=64
    )
    assert min(rate for rate in measured.greedy_acceptance if rate is not None) > 0.95
    lengths = accepted_lengths(overfitted, conversations, decoder)
    assert len(lengths) == measured.num_full_blocks == 8 * 22
    assert measured.greedy_accepted_length == pytest.approx(np.mean(lengths), abs=0.02)


def test_the_loss_of_an_overfitted_drafter_fell(overfitted: Path) -> None:
    losses = [line["loss"] for line in read_log(overfitted.parent) if "loss" in line]
    assert losses[-1] < 0.5 * losses[0]


CONFIG = make_config(block_size=3, markov_rank=0, markov_head_type=None, confidence_uses_markov=False)


def flat_module(confidence: float) -> DrafterModule:
    """Return a drafter whose every slot is uniform over 256 ids and equally confident."""
    tensors = make_tensors(CONFIG)
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    tensors["confidence_head.proj.weight"] = torch.zeros_like(tensors["confidence_head.proj.weight"])
    tensors["confidence_head.proj.bias"] = torch.logit(torch.tensor([confidence]))
    return DrafterModule.from_tensors(CONFIG, tensors)


def zeros(pack: object) -> list[Features]:
    assert isinstance(pack, list)
    return [
        Features(taps=torch.zeros(one.num_tokens, CONFIG.feature_size), final_hidden=torch.zeros(one.num_tokens, 1))
        for one in pack
    ]


def constant(probs: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda hidden: probs.log().expand(len(hidden), -1)


def test_accepted_length_multiplies_exact_acceptance_and_counts_the_bonus_token() -> None:
    probs = torch.full((256,), 0.5 / 255)
    probs[7] = 0.5  # min with the uniform draft: 1/256 + 255 * (0.5 / 255)
    rate = 0.5 + 1 / 256
    result = evaluate_drafter(flat_module(0.5), [conversation(range(9), 0)], zeros, constant(probs))
    assert result.acceptance == pytest.approx((rate,) * 3)
    assert result.num_slots == (8, 7, 6)
    assert (result.num_blocks, result.num_full_blocks) == (8, 6)
    assert result.accepted_length == pytest.approx(1 + rate + rate**2 + rate**3)
    assert result.greedy_accepted_length == 1.0  # the draft's argmax is id 0, the target's 7
    assert result.confidence_ece == pytest.approx(1 / 256, rel=1e-4)
    assert result.confidence_auc == pytest.approx(0.5)


def test_a_text_shorter_than_a_block_has_rates_but_no_length() -> None:
    result = evaluate_drafter(
        flat_module(0.5), [conversation(range(3), 0)], zeros, constant(torch.full((256,), 1 / 256))
    )
    assert result.accepted_length is None
    assert result.acceptance == (pytest.approx(1.0), pytest.approx(1.0), None)


def make_evaluation(bins: tuple[ReliabilityBin, ...], rounds: dict[str, RoundCounts]) -> Evaluation:
    return Evaluation(
        num_conversations=1, num_blocks=1, num_full_blocks=1, num_slots=(1,), accepted_length=1.5,
        greedy_accepted_length=1.5, acceptance=(0.5,), greedy_acceptance=(0.5,), confidence_ece=0.1,
        confidence_auc=None, reliability=bins, rounds=rounds,
    )  # fmt: skip


def test_results_of_files_are_joined_by_slots_and_by_rounds() -> None:
    counts = [RoundCounts(num_texts=1, num_rounds=n, num_emitted=2 * n, reached=[n], accepted=[n]) for n in (1, 3)]
    bins = [ReliabilityBin(confidence=c, acceptance=a, num_slots=n) for c, a, n in ((0.41, 0.2, 1), (0.45, 0.4, 3))]
    joined = to_json(
        {
            "a": make_evaluation((bins[0],), {"0": counts[0], "1": RoundCounts()}),
            "b": make_evaluation((bins[1],), {"0": counts[1], "1": RoundCounts()}),
        }
    )
    (reliability,) = joined["reliability"]
    assert reliability == {"confidence": pytest.approx(0.44), "acceptance": pytest.approx(0.35), "num_slots": 4}
    assert joined["temperatures"].keys() == {"0"}  # nothing was simulated at temperature 1
    assert joined["temperatures"]["0"]["all"]["num_rounds"] == 4
    assert joined["temperatures"]["0"]["tasks"]["b"]["num_rounds"] == 3
    assert joined["files"]["a"]["rounds"]["1"]["accepted_length"] is None
    json.dumps(joined)


def test_serving_is_simulated_along_texts_of_each_temperature(
    target_folder: Path, decoder: Decoder, overfitted: Path, tmp_path: Path
) -> None:
    """Greedy answers, with and without saying so, and others: one said to be of temperature 1, two of neither."""
    greedy, other = answer(decoder, [7, 8, 9], 12), [5, 4, 3, 2, 1, 0] * 2
    records = [
        {"prompt_ids": [7, 8, 9], "response_ids": ids} | extra
        for ids, extra in (
            (greedy, {}),
            (greedy, {"temperature": 0.0}),
            (greedy, {"temperature": 0.6}),
            (other, {"temperature": 1}),
            (other, {}),
        )
    ]
    path = str(write_records(tmp_path / "mixed.jsonl", records))
    rounds = evaluate(overfitted, [path], target=str(target_folder))[path].rounds
    assert rounds is not None
    assert (rounds["0"].num_texts, rounds["0"].num_emitted) == (2, 22)
    assert (rounds["1"].num_texts, rounds["1"].num_emitted) == (1, 11)
    fewer = evaluate(overfitted, [path], target=str(target_folder), num_round_texts=1)[path].rounds
    assert fewer is not None
    assert (fewer["0"].num_texts, fewer["1"].num_texts) == (1, 1)


def test_auc_is_the_exact_expectation_over_outcomes() -> None:
    """Pairs (accepted, rejected): weights .9*.1 + .2*.8 tie, .9*.8 ordered, .2*.1 reversed."""
    ties, ordered, reversed_pairs = 0.9 * 0.1 + 0.2 * 0.8, 0.9 * 0.8, 0.2 * 0.1
    expected = (ordered + 0.5 * ties) / (ties + ordered + reversed_pairs)
    assert expected_auc(np.array([0.7, 0.3]), np.array([0.9, 0.2])) == pytest.approx(expected)


def test_auc_of_outcomes_that_never_vary_does_not_exist() -> None:
    assert expected_auc(np.array([0.7, 0.3]), np.array([1.0, 1.0])) is None


def test_the_verb_measures_each_file_and_ends_with_json(
    target_folder: Path, data: Path, overfitted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["evaluate", str(overfitted), str(data), "--target", str(target_folder), "--num-sequences", "3"])
    out = capsys.readouterr().out
    assert status == 0
    assert "length T=1" in out
    result = json.loads(out.splitlines()[-1])
    assert result["kind"] == "offline"
    assert result["files"][str(data)]["num_conversations"] == 3
    assert len(result["files"][str(data)]["acceptance"]) == 3
    assert result["temperatures"]["0"]["tasks"][str(data)]["num_texts"] == 3  # the data do not say that they are greedy


def test_records_that_are_left_out_or_cut_are_counted(
    target_folder: Path, overfitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"prompt_ids": [1, 2], "response_ids": [3] * 30}, {"prompt_ids": [1], "response_ids": []}]
    path = str(write_records(tmp_path / "mixed.jsonl", records))
    assert main(["evaluate", str(overfitted), path, "--target", str(target_folder), "--max-length", "20"]) == 0
    out = capsys.readouterr().out
    assert f"{path}: 1 records without an answer left out, 1 cut\n" in out
    measured = json.loads(out.splitlines()[-1])["files"][path]
    assert (measured["num_conversations"], measured["num_unanswered"], measured["num_cut"]) == (1, 1, 1)


def test_a_negative_seed_is_refused(target_folder: Path, data: Path, overfitted: Path) -> None:
    with pytest.raises(ConfigError, match=r"seed \(-1\) must not be negative"):
        evaluate(overfitted, [str(data)], target=str(target_folder), seed=-1)


def test_only_held_out_conversations_can_be_measured(target_folder: Path, data: Path, overfitted: Path) -> None:
    everything = evaluate(overfitted, [str(data)], target=str(target_folder))
    held_out = evaluate(overfitted, [str(data)], target=str(target_folder), held_out_only=0.5)
    assert everything[str(data)].num_conversations == 8
    assert 0 < held_out[str(data)].num_conversations < 8


def test_nothing_held_out_is_refused(target_folder: Path, data: Path, overfitted: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no held-out conversation at a fraction of 0\.0"):
        evaluate(overfitted, [str(data)], target=str(target_folder), held_out_only=0.0)


def test_a_drafter_of_another_target_is_refused(data: Path, target_folder: Path) -> None:
    other = Path(__file__).parents[1] / "fixtures" / "deepspec_vanilla"
    with pytest.raises(CheckpointError, match="target of hidden size 64, this target has 32"):
        evaluate(other, [str(data)], target=str(target_folder))


def test_the_train_verb_takes_settings_from_flags(
    target_folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--max-steps 1 --tap-ids=-1,2 --hold-out-fraction 0 --no-has-confidence-head --block-size 2 --seed 5"
    output = tmp_path / "out"
    status = main(["train", str(data), "--output", str(output), "--target", str(target_folder), *flags.split()])
    assert status == 0
    assert capsys.readouterr().out.strip() == str(output / "step-00000001")
    record = json.loads((output / "run.json").read_text())
    assert record["settings"]["tap_ids"] == [-1, 2]
    assert record["settings"]["has_confidence_head"] is False
    assert record["seed"] == 5


def test_the_train_verb_reports_a_users_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "gone.jsonl", "--output", str(tmp_path / "out"), "--block-size", "0"]) == 2
    assert "block_size (0) must be at least 1" in capsys.readouterr().err
