"""Both implementations of the drafter give the stored tensors and greedy chains of every stored checkpoint."""

from __future__ import annotations

import pytest
import torch
from drafter_cases import (
    DEEPSPEC,
    FIXTURES,
    SPECULATORS,
    GreedyDraft,
    PagedContext,
    case,
    draft_with_module,
    load,
    load_module,
    stage,
)
from torch import Tensor

from dspark.models.drafter_attention import DraftRow

PAGES = [9, 2, 30, 7, 0, 21, 5, 13, 40, 3, 11, 28]  # of a sequence of up to 48 tokens


def near(got: Tensor | None, expected: Tensor) -> None:
    assert got is not None
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def check_stage(got: GreedyDraft, expected: dict[str, Tensor]) -> None:
    near(got.hidden[0], expected["backbone_hidden"])
    near(got.base_logits[0], expected["base_logits"])
    near(got.logits[0], expected["greedy_corrected_logits"])
    assert got.target_ids[0].tolist() == expected["greedy_tokens"].tolist()
    if "greedy_confidence_logits" in expected:
        near(
            got.confidence_logits[0] if got.confidence_logits is not None else None,
            expected["greedy_confidence_logits"],
        )
    else:
        assert got.confidence_logits is None


def check_forced(got: GreedyDraft, expected: dict[str, Tensor]) -> None:
    near(got.logits[0], expected["forced_corrected_logits"])
    if got.confidence_logits is not None:
        near(got.confidence_logits[0], expected["forced_confidence_logits"])


def row_of(expected: dict[str, Tensor], pages: list[int]) -> DraftRow:
    return DraftRow(
        anchor_token_id=expected["anchor_token_id"].item(),
        anchor_position=expected["anchor_position"].item(),
        page_ids=pages,
    )


@pytest.mark.parametrize("name", DEEPSPEC)
def test_four_rounds_of_deepspec_drafters_over_growing_pages(name: str) -> None:
    context = PagedContext.of(load(FIXTURES / name))
    for number in range(1, 5):
        expected = stage(name, number)
        context.write(expected["context_target_hidden"], expected["context_positions"], PAGES)
        row = row_of(expected, PAGES)
        check_stage(context.draft([row]), expected)
        check_forced(context.draft([row], expected["forced_tokens"][None]), expected)


@pytest.mark.parametrize("name", DEEPSPEC)
def test_four_rounds_of_deepspec_drafters_as_a_module(name: str) -> None:
    module = load_module(FIXTURES / name)
    features, positions = [], []
    for number in range(1, 5):
        expected = stage(name, number)
        features.append(expected["context_target_hidden"])
        positions.append(expected["context_positions"])
        arguments = (
            torch.cat(features),
            torch.cat(positions),
            expected["anchor_token_id"],
            expected["anchor_position"],
        )
        check_stage(draft_with_module(module, *arguments), expected)
        check_forced(draft_with_module(module, *arguments, expected["forced_tokens"][None]), expected)


def check_blocks(got: GreedyDraft, expected: dict[str, Tensor], first: int) -> None:
    """`first` is the first proposing slot: logits of others are not made while drafting."""
    near(got.hidden, expected["backbone_hidden"])
    near(got.base_logits, expected["base_logits"][:, first:])
    near(got.logits, expected["greedy_logits"][:, first:])
    assert got.draft_ids.tolist() == expected["greedy_draft_ids"][:, first:].tolist()
    assert got.target_ids.tolist() == expected["greedy_target_ids"][:, first:].tolist()
    if "greedy_confidence_logits" in expected:
        near(got.confidence_logits, expected["greedy_confidence_logits"][:, first:])
    else:
        assert got.confidence_logits is None


@pytest.mark.parametrize("name", SPECULATORS)
def test_blocks_of_speculators_drafters_over_pages(name: str) -> None:
    context, expected = PagedContext.of(load(FIXTURES / name)), case(name)
    context.write(expected["aux_hidden_states"], torch.arange(48), PAGES)
    rows = [
        DraftRow(anchor_token_id=token, anchor_position=position, page_ids=PAGES)
        for token, position in zip(
            expected["anchor_token_ids"].tolist(), expected["anchor_positions"].tolist(), strict=True
        )
    ]
    check_blocks(context.draft(rows), expected, context.drafter.config.first_proposal_slot)


@pytest.mark.parametrize("name", SPECULATORS)
def test_blocks_of_speculators_drafters_as_a_module(name: str) -> None:
    module, expected = load_module(FIXTURES / name), case(name)
    got = draft_with_module(
        module,
        expected["aux_hidden_states"],
        torch.arange(48),
        expected["anchor_token_ids"],
        expected["anchor_positions"],
    )
    check_blocks(got, expected, module.config.first_proposal_slot)


@pytest.mark.parametrize("name", SPECULATORS)
def test_teacher_forced_logits_of_every_slot(name: str) -> None:
    module, expected = load_module(FIXTURES / name), case(name)
    anchors = expected["anchor_positions"]
    offsets = torch.tensor(module.config.previous_offsets)
    previous = expected["input_ids"][(anchors[:, None] + offsets).clamp(max=47)]
    assert previous.tolist() == expected["teacher_prev_token_ids"].tolist()
    predicted = anchors[:, None] + torch.tensor(module.config.predicted_offsets)
    assert predicted.tolist() == expected["predicted_positions"].tolist()
    visible = torch.arange(48)[None] < anchors[:, None]
    with torch.no_grad():
        features = module(
            expected["aux_hidden_states"],
            torch.arange(48),
            expected["anchor_token_ids"],
            anchors,
            visible,
            previous,
        )
        logits = module.corrected_logits(features, torch.ones_like(previous, dtype=torch.bool))
    near(logits.unflatten(0, previous.shape), expected["teacher_logits"])
    if "teacher_confidence_logits" in expected:
        near(features.confidence_logits, expected["teacher_confidence_logits"])


@pytest.mark.parametrize("name", ["deepspec_gated", "speculators_anchor_window"])
def test_requests_drafted_together_equal_each_alone(name: str) -> None:
    """Contexts of 1 to 40 positions, in pages that interleave."""
    context = PagedContext.of(load(FIXTURES / name), num_pages=40)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for request, length in enumerate([11, 1, 40, 23]):
        pages = [request + 4 * place for place in torch.randperm(10, generator=generator).tolist()]
        taps = torch.randn((length, 192), generator=generator)
        context.write(taps, torch.arange(length), pages)
        rows.append(DraftRow(anchor_token_id=10 + request, anchor_position=length, page_ids=pages))
    together = context.draft(rows)
    for i, row in enumerate(rows):
        alone = context.draft([row])
        near(together.hidden[i], alone.hidden[0])
        assert together.target_ids[i].tolist() == alone.target_ids[0].tolist()
