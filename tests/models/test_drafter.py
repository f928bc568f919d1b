"""Drafting over pages equals the trainable module for every kind of drafter, and keeps to its windows and slots."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from drafter_cases import PagedContext, draft_with_module, make_config, make_tensors
from torch import Tensor

from dspark.errors import ConfigError
from dspark.models.drafter import Drafter
from dspark.models.drafter_attention import DraftRow
from dspark.models.drafter_config import DrafterConfig, check_num_draft_tokens
from dspark.models.drafter_module import DrafterModule, attention_calls

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
KINDS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "rnn-fill-in": {"markov_head_type": "rnn", "samples_from_anchor": False},
    "dflash": {"markov_rank": 0, "markov_head_type": None, "confidence_uses_markov": False},
    "no-confidence": {"has_confidence_head": False, "confidence_uses_markov": False},
    "pruned-fill-in": {"draft_vocab_size": 100, "samples_from_anchor": False},
    "windows": {"windows": (3, 9), "is_causal": (True, False)},
    "causal-full": {"is_causal": (True, True)},
    "yarn": {"rope_parameters": YARN, "max_position": 128},
    "one-slot": {"block_size": 1},
    # More slots than rows of different lengths share a group for.
    "long-block": {"block_size": 18, "markov_head_type": "rnn", "windows": (3, 9), "is_causal": (True, False)},
}
LENGTHS = [17, 3, 40, 0]
ANCHORS = [5, 6, 7, 8]


def contexts(config: DrafterConfig) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn((length, config.feature_size), generator=generator) for length in LENGTHS]


def paged(config: DrafterConfig, tensors: dict[str, Tensor]) -> tuple[PagedContext, list[DraftRow]]:
    context = PagedContext.of(Drafter(config, tensors))
    rows = []
    for request, taps in enumerate(contexts(config)):
        pages = [request + len(LENGTHS) * place for place in (7, 0, 3, 12, 5, 1, 9, 11, 2, 4)]
        context.write(taps, torch.arange(len(taps)), pages)
        rows.append(DraftRow(anchor_token_id=ANCHORS[request], anchor_position=len(taps), page_ids=pages))
    return context, rows


@pytest.mark.parametrize("kind", KINDS)
def test_batched_drafting_equals_the_module(kind: str) -> None:
    config = make_config(**KINDS[kind])
    tensors = make_tensors(config)
    module = DrafterModule.from_tensors(config, tensors)
    context, rows = paged(config, tensors)
    got = context.draft(rows)
    for request, taps in enumerate(contexts(config)):
        length, anchor = torch.tensor([LENGTHS[request]]), torch.tensor([ANCHORS[request]])
        expected = draft_with_module(module, taps, torch.arange(len(taps)), anchor, length)
        torch.testing.assert_close(got.hidden[request], expected.hidden[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(got.logits[request], expected.logits[0], atol=1e-4, rtol=1e-4)
        assert got.target_ids[request].tolist() == expected.target_ids[0].tolist()
        if config.has_confidence_head:
            assert got.confidence_logits is not None and expected.confidence_logits is not None
            torch.testing.assert_close(
                got.confidence_logits[request], expected.confidence_logits[0], atol=1e-4, rtol=1e-4
            )


def test_drafting_writes_nothing_into_the_pages() -> None:
    config = make_config(windows=(3, None), is_causal=(True, False))
    context, rows = paged(config, make_tensors(config))
    before = [pool.clone() for pool in context.kv_cache.pools]
    context.draft(rows)
    assert all(torch.equal(pool, old) for pool, old in zip(context.kv_cache.pools, before, strict=True))


def hidden_after_change(config: DrafterConfig, changed_position: int) -> Tensor:
    """Hidden states [B, D] of a block after 20 positions, one of which has other features."""
    taps = torch.randn((20, config.feature_size), generator=torch.Generator().manual_seed(8))
    taps[changed_position] += 1.0
    context = PagedContext.of(Drafter(config, make_tensors(config)))
    pages = [4, 2, 0, 3, 1]
    context.write(taps, torch.arange(20), pages)
    row = DraftRow(anchor_token_id=9, anchor_position=20, page_ids=pages)
    with torch.inference_mode():
        return context.drafter.draft_blocks([row], context.kv_cache).hidden[0]


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_window_is_counted_from_the_anchor_for_every_slot(is_causal: bool) -> None:
    """Window 6 before anchor 20: position 13 is seen by nobody, position 14 by all slots, the last one too."""
    config = make_config(num_layers=1, windows=(6,), is_causal=(is_causal,))
    outside, further_outside = hidden_after_change(config, 13), hidden_after_change(config, 2)
    assert torch.equal(outside, further_outside)
    inside = hidden_after_change(config, 14)
    assert ((inside - outside).abs().amax(dim=1) > 1e-4).tolist() == [True] * 5


@pytest.mark.parametrize(
    ("is_causal", "unchanged"), [(True, [True, True, False, False]), (False, [False, False, False, False])]
)
def test_a_causal_block_sees_earlier_slots_only(is_causal: bool, unchanged: list[bool]) -> None:
    """The third of four slots is changed."""
    config = make_config(num_layers=1, windows=(None,), is_causal=(is_causal,), block_size=4)
    tensors = make_tensors(config)
    module = DrafterModule.from_tensors(config, tensors)
    layer = module.layers[0]
    context = torch.zeros(1, 64)
    calls = attention_calls(torch.zeros((1, 1), dtype=torch.bool), 4, is_causal=is_causal)
    phases = module._phases(torch.arange(4))
    block = torch.randn((1, 4, 64), generator=torch.Generator().manual_seed(1))
    changed = block.clone()
    changed[0, 2] += 1.0
    with torch.no_grad():
        before, after = (layer(x, context, phases, module._phases(torch.arange(1)), calls) for x in (block, changed))
    assert [torch.equal(before[0, slot], after[0, slot]) for slot in range(4)] == unchanged


def test_fill_in_proposes_from_the_slot_after_the_anchor() -> None:
    """The same weights and block: what slot k proposes for anchor+k+1 in one convention, it does for anchor+k."""
    tensors = make_tensors(make_config())
    from_anchor, rows = paged(make_config(), tensors)
    fill_in, _ = paged(make_config(samples_from_anchor=False), tensors)
    first, second = from_anchor.draft(rows), fill_in.draft(rows)
    assert (first.base_logits.shape[1], second.base_logits.shape[1]) == (5, 4)
    torch.testing.assert_close(second.base_logits, first.base_logits[:, 1:])


def test_fewer_proposals_are_the_first_of_the_whole_block() -> None:
    config = make_config()
    context, rows = paged(config, make_tensors(config))
    with torch.inference_mode():
        whole = context.drafter.draft_blocks(rows, context.kv_cache).base_logits
        fewer = context.drafter.draft_blocks(rows, context.kv_cache, num_proposals=3).base_logits
    torch.testing.assert_close(fewer, whole[:, :3])


@pytest.mark.parametrize(("samples_from_anchor", "trained"), [(True, 5), (False, 4)])
def test_more_proposals_than_trained_are_refused(samples_from_anchor: bool, trained: int) -> None:
    """Case I6."""
    config = make_config(samples_from_anchor=samples_from_anchor)
    check_num_draft_tokens(config, trained)
    with pytest.raises(ConfigError, match=rf"num_draft_tokens \({trained + 1}\).*trained length \({trained}\)"):
        check_num_draft_tokens(config, trained + 1)
    with pytest.raises(ConfigError, match=r"num_draft_tokens \(0\)"):
        check_num_draft_tokens(config, 0)


def test_context_written_in_pieces_equals_context_written_at_once() -> None:
    config = make_config()
    taps = torch.randn((11, config.feature_size), generator=torch.Generator().manual_seed(2))
    pages = [2, 0, 1]
    row = DraftRow(anchor_token_id=9, anchor_position=11, page_ids=pages)
    drafts = []
    for cuts in ([0, 11], [0, 4, 5, 11]):
        context = PagedContext.of(Drafter(config, make_tensors(config)))
        for start, end in itertools.pairwise(cuts):
            context.write(taps[start:end], torch.arange(start, end), pages)
        drafts.append(context.draft([row]))
    torch.testing.assert_close(drafts[0].logits, drafts[1].logits)
    assert drafts[0].target_ids.tolist() == drafts[1].target_ids.tolist()


def test_16_bit_drafting_stays_near_32_bit() -> None:
    config = make_config(markov_head_type="rnn", windows=(6, None), is_causal=(True, False))
    tensors = make_tensors(config)
    full, rows = paged(config, tensors)
    expected = full.draft(rows)
    half = PagedContext.of(Drafter(config, {name: t.bfloat16() for name, t in tensors.items()}))
    for row, taps in zip(rows, contexts(config), strict=True):
        half.write(taps.bfloat16(), torch.arange(len(taps)), row.page_ids)
    got = half.draft(rows, expected.target_ids)
    assert got.base_logits.dtype == got.logits.dtype == torch.float32
    assert (got.logits - expected.logits).abs().max() < 0.1 * expected.logits.abs().max()
