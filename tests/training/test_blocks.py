"""Blocks: where anchors may stand, which slots are supervised, what a block can see."""

from __future__ import annotations

import pytest
import torch
from drafter_cases import make_config, make_tensors
from torch import Tensor
from training_cases import CPU, conversation

from dspark.models.drafter_module import DrafterModule
from dspark.training.block_pass import run_blocks
from dspark.training.blocks import BlockBatch, anchor_candidates, build_blocks, count_supervised, draw_anchors
from dspark.training.dataset import Conversation
from dspark.training.features import Features

CONFIG = make_config(block_size=3)


def random_features(num_tokens: int, seed: int) -> Features:
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn((num_tokens, CONFIG.feature_size), generator=generator)
    return Features(taps=taps, final_hidden=torch.randn((num_tokens, 64), generator=generator))


def blocks_of(conversations: list[Conversation], features: list[Features] | None = None) -> BlockBatch:
    features = features or [random_features(c.num_tokens, seed) for seed, c in enumerate(conversations)]
    anchors = [anchor_candidates(c, CONFIG) for c in conversations]
    return build_blocks(conversations, features, anchors, CONFIG, device=CPU)


def test_anchors_stand_where_a_slot_is_supervised() -> None:
    assert anchor_candidates(conversation(range(10), 6), CONFIG).tolist() == [3, 4, 5, 6, 7, 8]


def test_the_slots_of_a_block_predict_the_tokens_after_its_anchor() -> None:
    one = conversation([10, 11, 12, 13, 14, 15], 0)
    batch = build_blocks([one], [random_features(6, 0)], [anchor_candidates(one, CONFIG)[1:2]], CONFIG, device=CPU)
    assert batch.anchor_token_ids.tolist() == [11]
    assert batch.previous_token_ids.tolist() == [[11, 12, 13]]
    assert batch.labels.tolist() == [[12, 13, 14]]
    assert batch.target_rows.tolist() == [[1, 2, 3]]
    assert batch.context_visible.tolist() == [[True, False, False, False, False, False]]


def test_fill_in_blocks_predict_one_token_later_and_skip_the_first_slot() -> None:
    config = make_config(block_size=3, samples_from_anchor=False)
    one = conversation([10, 11, 12, 13, 14, 15], 0)
    batch = build_blocks([one], [random_features(6, 0)], [anchor_candidates(one, config)[1:2]], config, device=CPU)
    assert batch.labels.tolist() == [[0, 12, 13]]
    assert batch.is_supervised.tolist() == [[False, True, True]]
    assert batch.previous_token_ids.tolist() == [[11, 11, 12]]
    assert batch.target_rows.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("num_tokens", [2, 3, 4])  # up to a block and its anchor
def test_short_texts_make_partial_blocks(num_tokens: int) -> None:
    """Case M3."""
    batch = blocks_of([conversation(range(num_tokens), 0)])
    assert batch.num_blocks == num_tokens - 1
    assert batch.is_supervised.sum(1).tolist() == [min(3, num_tokens - 1 - n) for n in range(num_tokens - 1)]


def test_a_text_of_one_token_has_no_anchor() -> None:
    """Case M3."""
    one = conversation([5], 0)
    assert anchor_candidates(one, CONFIG).tolist() == []
    assert blocks_of([one, conversation([1, 2], 0)]).num_blocks == 1


def test_late_supervision_masks_single_slots() -> None:
    """Case M3."""
    batch = blocks_of([conversation(range(8), 6)])
    assert batch.anchor_positions.tolist() == [3, 4, 5, 6]
    assert batch.is_supervised.int().tolist() == [[0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert count_supervised(conversation(range(8), 6), CONFIG, batch.anchor_positions.numpy()) == 6


def test_anchors_differ_by_epoch_and_repeat_for_the_same_key() -> None:
    one = conversation(range(100), 10)
    first, again, next_epoch = (
        draw_anchors(one, CONFIG, num_anchors=8, seed=1, epoch=epoch).tolist() for epoch in (0, 0, 1)
    )
    assert first == again == sorted(set(first))
    assert len(first) == 8
    assert first != next_epoch


def test_all_candidates_are_taken_when_they_are_few() -> None:
    one = conversation(range(6), 3)
    assert (
        draw_anchors(one, CONFIG, num_anchors=64, seed=0, epoch=0).tolist() == anchor_candidates(one, CONFIG).tolist()
    )


def hidden_of(conversations: list[Conversation], features: list[Features]) -> Tensor:
    module = DrafterModule.from_tensors(CONFIG, make_tensors(CONFIG))
    with torch.no_grad():
        return run_blocks(module, blocks_of(conversations, features)).hidden


def test_blocks_do_not_see_the_other_document_of_a_pack() -> None:
    """Case M9."""
    first, second = conversation(range(12), 4, 0), conversation(range(20, 35), 4, 1)
    features = [random_features(12, 0), random_features(15, 1)]
    changed = [features[0], random_features(15, 2)]
    num_own = len(anchor_candidates(first, CONFIG))
    before, after = hidden_of([first, second], features), hidden_of([first, second], changed)
    assert torch.equal(before[:num_own], after[:num_own])
    assert not torch.equal(before[num_own:], after[num_own:])


def test_blocks_see_context_strictly_before_their_anchor() -> None:
    """Case M9."""
    one = conversation(range(12), 4)
    taps = random_features(12, 0).taps
    changed = taps.clone()
    changed[7] += 1  # what the target computes at 7 knows the token at 7
    anchors = anchor_candidates(one, CONFIG)
    before, after = (hidden_of([one], [Features(taps=t, final_hidden=None)]) for t in (taps, changed))
    same = [torch.equal(before[i], after[i]) for i in range(len(anchors))]
    assert same == [bool(anchor <= 7) for anchor in anchors]
