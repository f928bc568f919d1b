"""Rounds to calibrate with: drafts and confidences are those of serving, their acceptance that of `rejection`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_cases import PagedContext, make_config, make_tensors
from training_cases import answer, conversation

from dspark.errors import CheckpointError, ConfigError
from dspark.models.decoder import Decoder
from dspark.models.drafter import Drafter
from dspark.models.drafter_attention import DraftRow
from dspark.models.drafter_checkpoint import save_drafter
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_module import DrafterModule
from dspark.models.heads import SequentialHead
from dspark.training.calibrate import calibrate_drafter
from dspark.training.dataset import Conversation
from dspark.training.features import Features, OnlineFeatures
from dspark.training.judged_rounds import (
    JudgedDrafts,
    Rounds,
    collect_rounds,
    draw_judged,
    judge_drafts,
    visited_anchors,
)
from dspark.training.simulated_rounds import acceptance_along

NUM_PROMPT = 5


def small_config(**changes: Any) -> DrafterConfig:
    """Return the configuration of a drafter for the room's tiny target."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "target_hidden_size": 32,
        "vocab_size": 264,
        "draft_vocab_size": 264,
        "num_target_layers": 4,
        "block_size": 3,
    }
    return make_config(**sizes | changes)


@pytest.fixture(scope="module")
def text(decoder: Decoder) -> Conversation:
    """A greedy answer of 24 tokens."""
    prompt = [3, 80, 21, 9, 140]
    return conversation(prompt + answer(decoder, prompt, 24), NUM_PROMPT)


def judged(module: DrafterModule, one: Conversation, decoder: Decoder, *, is_greedy: bool) -> JudgedDrafts:
    (features,) = OnlineFeatures(decoder, module.config.tap_ids, chunk_tokens=512)([one])
    head = SequentialHead(module.config, module.state_dict())
    span = (NUM_PROMPT, one.num_tokens)
    return judge_drafts(
        module, head, one, span, features, decoder.compute_logits,
        is_greedy=is_greedy, seed=(0, 0, NUM_PROMPT), keeps_inputs=True,
    )  # fmt: skip


KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "rnn-fill-in": {"markov_head_type": "rnn", "samples_from_anchor": False, "block_size": 4},
    "pruned": {"draft_vocab_size": 100},
    "dflash": {"markov_rank": 0, "markov_head_type": None, "confidence_uses_markov": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_confidences_are_those_of_serving_along_what_it_drafts(kind: str, text: Conversation, decoder: Decoder) -> None:
    """Greedy drafts over pages, at every anchor; no other token enters, also behind a wrong one."""
    config = small_config(**KINDS[kind])
    tensors = make_tensors(config)
    got = judged(DrafterModule.from_tensors(config, tensors), text, decoder, is_greedy=True)
    (features,) = OnlineFeatures(decoder, config.tap_ids, chunk_tokens=512)([text])
    context, pages = PagedContext.of(Drafter(config, tensors)), list(range(20, 0, -1))
    context.write(features.taps, torch.arange(text.num_tokens), pages)
    ids = text.token_ids.tolist()
    assert len(got.num_accepted) == 24 - 3
    for index in range(len(got.num_accepted)):
        anchor = NUM_PROMPT + index
        draft = context.draft([DraftRow(anchor_token_id=ids[anchor], anchor_position=anchor, page_ids=pages)])
        assert draft.confidence_logits is not None
        np.testing.assert_allclose(got.confidence_logits[index], draft.confidence_logits[0], atol=1e-4)
        matches = np.array(ids[anchor + 1 : anchor + 4]) == draft.target_ids[0].numpy()
        assert got.acceptance[index].tolist() == np.cumprod(matches).tolist()
        assert got.num_accepted[index] == np.cumprod(matches).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_greedy", [True, False])
def test_kept_inputs_are_what_the_head_read(kind: str, is_greedy: bool, text: Conversation, decoder: Decoder) -> None:
    """The head's weights times the inputs are the confidence logits, of every slot."""
    config = small_config(**KINDS[kind])
    tensors = make_tensors(config)
    got = judged(DrafterModule.from_tensors(config, tensors), text, decoder, is_greedy=is_greedy)
    weights, bias = (tensors[f"confidence_head.proj.{name}"].double().numpy() for name in ("weight", "bias"))
    assert got.head_inputs is not None
    assert got.head_inputs.shape == (21, 3, config.confidence_input_size)
    np.testing.assert_allclose(got.head_inputs @ weights[0] + bias, got.confidence_logits, atol=1e-5)


def test_greedy_acceptance_is_that_of_simulated_rounds(text: Conversation, decoder: Decoder) -> None:
    """A drafter whose head is the target's own and whose layers say nothing much: some of it is accepted."""
    config = small_config()
    module = DrafterModule.from_tensors(config, make_tensors(config))
    features = OnlineFeatures(decoder, config.tap_ids, chunk_tokens=512)
    along = acceptance_along(module, text, (NUM_PROMPT, text.num_tokens), features, decoder.compute_logits)
    got = judged(module, text, decoder, is_greedy=True)
    assert got.is_argmax and along.is_argmax
    assert got.acceptance.tolist() == np.cumprod(along.greedy, axis=1)[: len(got.acceptance)].tolist()


def flat_module(**changes: Any) -> DrafterModule:
    """Return a drafter that finds every draft id equally likely."""
    config = small_config(**changes)
    tensors = make_tensors(config)
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in tensors:
            tensors[name] = torch.zeros_like(tensors[name])
    return DrafterModule.from_tensors(config, tensors)


def along_constant(module: DrafterModule, token_ids: list[int], probs: torch.Tensor, **settings: Any) -> Rounds:
    """Collect rounds along a text of temperature 1 that was drawn from the same distribution everywhere."""
    one = Conversation(
        index=0,
        token_ids=np.array(token_ids),
        is_supervised=np.arange(len(token_ids)) > 0,
        is_held_out=False,
        temperature=settings.pop("temperature", 1.0),
    )

    def features(pack: object) -> list[Features]:
        taps = torch.zeros(len(token_ids), module.config.feature_size)
        return [Features(taps=taps, final_hidden=torch.zeros(len(token_ids), 1))]

    return collect_rounds(module, [one], features, lambda hidden: probs.log().expand(len(hidden), -1), **settings)


UNIFORM = torch.full((264,), 1 / 264)
SKEWED = torch.full((264,), 0.5 / 263)
SKEWED[7] = 0.5


def test_a_draft_from_the_targets_own_distribution_is_always_accepted() -> None:
    got = along_constant(flat_module(), [0, 3, 5, 7, 9, 11, 2, 4, 6], UNIFORM)
    assert got.acceptance == pytest.approx(np.ones((2, 3)))  # anchors 1 and 5: rounds move on by 4


def test_acceptance_at_temperature_one_is_the_overlap_of_both_distributions() -> None:
    """Uniform draft: token 7 overlaps with 1/264, the 263 others with .5/263 each."""
    got = along_constant(flat_module(), [7, 3] * 100, SKEWED)  # token 7 is hardly ever accepted, 3 always
    overlap = 1 / 264 + 0.5
    assert got.acceptance[:, 0] == pytest.approx(np.full(len(got.acceptance), overlap), abs=1e-6)
    later = np.unique(got.acceptance[:, 1:].round(6))
    assert later.tolist() == pytest.approx([0, overlap], abs=1e-5)  # rejected before, or not


def test_mass_outside_the_draft_vocabulary_is_never_accepted() -> None:
    """The draft ids are 0, 2, .. 198: each has 1/100 in the draft and 1/264 in the target."""
    got = along_constant(flat_module(draft_vocab_size=100), [1, 3, 5, 7, 9, 11], UNIFORM)
    assert got.acceptance == pytest.approx(np.array([[100 / 264, 0, 0]] * 2), abs=1e-6)  # odd tokens came out


def test_an_argmax_draft_is_accepted_with_the_targets_probability_of_it() -> None:
    module = flat_module(**KINDS["dflash"])
    with torch.no_grad():
        module.norm.weight.fill_(1.0)
        module.lm_head.weight.zero_()
    got = along_constant(module, [0, 3, 0, 0, 0], SKEWED)  # all logits 0: the argmax is id 0
    assert got.acceptance == pytest.approx(np.full((1, 3), 0.5 / 263))


def test_proposals_follow_the_draft_and_are_accepted_as_rejection_accepts_them() -> None:
    """200,000 draws over three ids: frequencies within 5 standard errors (.0056), false alarm below 1e-5 in all."""
    generator = torch.Generator().manual_seed(4)
    draft, target = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    num_rows = 200_000
    text = torch.multinomial(target, num_rows, replacement=True, generator=generator)
    is_text = torch.nn.functional.one_hot(text, 3).bool()
    rows = (draft.expand(num_rows, 3), target.expand(num_rows, 3))
    drawn, is_accepted = draw_judged(*rows, is_text, torch.ones(num_rows, dtype=torch.bool), generator)
    joint = [[float(((drawn == i) & (is_accepted == a)).float().mean()) for i in range(3)] for a in (True, False)]
    assert joint[0] == pytest.approx([0.2, 0.3, 0.1], abs=0.0056)
    assert joint[1] == pytest.approx([0.4, 0.0, 0.0], abs=0.0056)
    assert bool((drawn[is_accepted] == text[is_accepted]).all())
    assert not bool((drawn[~is_accepted] != 0).any())


def test_behind_a_rejection_drafts_are_drawn_plainly_and_none_is_accepted() -> None:
    """10,000 draws within 5 standard errors (.025), false alarm below 1e-5."""
    draft, target = torch.tensor([[0.5, 0.5]]).expand(10_000, 2), torch.tensor([[1.0, 0.0]]).expand(10_000, 2)
    is_text = torch.tensor([[True, False]]).expand(10_000, 2)
    generator = torch.Generator().manual_seed(4)
    drawn, is_accepted = draw_judged(draft, target, is_text, torch.zeros(10_000, dtype=torch.bool), generator)
    assert not bool(is_accepted.any())
    assert float(drawn.float().mean()) == pytest.approx(0.5, abs=0.025)


def test_rounds_start_where_the_last_one_stumbled() -> None:
    assert visited_anchors(np.array([2, 9, 9, 0, 1, 9])) == [0, 3, 4]
    assert visited_anchors(np.array([])) == []


def test_an_answer_too_short_for_a_whole_block_gives_no_round() -> None:
    """Case J11: what was cut off is not guessed."""
    assert along_constant(flat_module(), [0, 3, 5, 7], UNIFORM).acceptance.shape == (0, 3)
    assert along_constant(flat_module(), [0, 3, 5, 7, 9], UNIFORM).acceptance.shape == (1, 3)


@pytest.mark.parametrize(
    ("temperature", "kinds", "num_rounds"),
    [(1.0, ["1"], 1), (1.0, ["0"], 0), (0.6, ["0", "1"], 0), (None, ["0", "1"], 0), (0.0, ["0"], 1)],
)
def test_only_texts_of_the_wanted_temperatures_are_used(
    temperature: float | None, kinds: list[str], num_rounds: int
) -> None:
    """A text of unknown temperature that is not greedy (all but token 7) counts for none."""
    got = along_constant(flat_module(), [0, 3, 5, 8, 9], SKEWED, temperature=temperature, kinds=kinds)
    assert len(got.acceptance) == num_rounds


def test_an_unknown_temperature_is_greedy_where_the_text_is() -> None:
    assert len(along_constant(flat_module(), [0, 3, 7, 7, 7], SKEWED, temperature=None).acceptance) == 1


def test_draws_are_keyed_by_the_seed() -> None:
    first, same, other = (along_constant(flat_module(), [7, 3] * 40, SKEWED, seed=seed) for seed in (1, 1, 2))
    assert first.confidence_logits.tolist() == same.confidence_logits.tolist()
    assert first.confidence_logits.tolist() != other.confidence_logits.tolist()


def save(folder: Path, config: DrafterConfig, **tensors: torch.Tensor) -> Path:
    save_drafter(folder, config, make_tensors(config) | tensors, layout="deepspec")
    return folder


def test_a_drafter_is_calibrated_on_files_of_texts(target_folder: Path, data: Path, tmp_path: Path) -> None:
    """Each of the eight answers has 24 tokens."""
    seen: list[tuple[int, int]] = []
    folder = save(tmp_path / "drafter", small_config())
    got = calibrate_drafter(
        folder, [str(data)], target=str(target_folder), progress=lambda done, total: seen.append((done, total))
    )
    fitted = got.calibration
    assert (got.head, got.head_record, fitted.ece_refitted) == (None, {}, None)
    assert len(fitted.temperatures) == 3
    assert fitted.num_rounds > 8 * 24 / 4 - 8
    assert fitted.ece_after[0] <= fitted.ece_before[0] + 1e-12
    assert (seen[0], seen[-1]) == ((0, 8), (8, 8))


def test_a_drafter_without_a_confidence_head_is_refused_by_name(
    target_folder: Path, data: Path, tmp_path: Path
) -> None:
    folder = save(tmp_path / "silent", small_config(has_confidence_head=False, confidence_uses_markov=False))
    with pytest.raises(CheckpointError, match=r"silent has no confidence head, so there is nothing to calibrate"):
        calibrate_drafter(folder, [str(data)], target=str(target_folder))


def test_confidences_that_are_no_numbers_are_refused(target_folder: Path, data: Path, tmp_path: Path) -> None:
    folder = save(
        tmp_path / "broken", small_config(), **{"confidence_head.proj.bias": torch.tensor([float("nan")])}
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="confidences on these texts are not numbers"):
        calibrate_drafter(folder, [str(data)], target=str(target_folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperatures": (0.6,)}, r"temperatures \(0\.6\) must be 0, 1 or both"),
        ({"temperatures": ()}, r"temperatures \(\) must be 0, 1 or both"),
        ({"temperatures": (1.0,)}, "no text of temperature 1 among 8 conversations has an answer longer than 3"),
        ({"seed": -1}, r"seed \(-1\) must not be negative"),
        ({"held_out_only": 0.0}, "has no held-out conversation"),
        ({"refit_head": True}, r"8 texts are too few to refit a head to, which takes 10"),
    ],
)
def test_wrong_settings_and_data_are_said(
    settings: dict[str, Any], message: str, target_folder: Path, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        calibrate_drafter(
            save(tmp_path / "drafter", small_config()), [str(data)], target=str(target_folder), **settings
        )


def test_more_than_the_training_run_held_out_is_refused(target_folder: Path, data: Path, tmp_path: Path) -> None:
    """Its record says so; the files would hold texts that the drafter was trained on."""
    folder = save(tmp_path / "drafter", small_config())
    record = {"step": 1, "identity": {}, "settings": {"hold_out_fraction": 0.05}}
    (folder / "training.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"--held-out \(0\.1\) is more than the training run .* held out \(0\.05\)"):
        calibrate_drafter(folder, [str(data)], target=str(target_folder), held_out_only=0.1)
