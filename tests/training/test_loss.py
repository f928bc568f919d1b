"""The loss: its terms against an obvious reference, chunks, gradients, pruned vocabularies, missing parts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from drafter_cases import make_config, make_tensors
from torch import Tensor
from training_cases import CPU, conversation

from dspark.errors import ConfigError
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_module import DrafterModule
from dspark.training.block_pass import run_blocks
from dspark.training.blocks import BlockBatch, anchor_candidates, build_blocks
from dspark.training.features import Features
from dspark.training.loss import DrafterLoss, LossSums, LossWeights, _DistributionTerms

HEAD = torch.randn((256, 64), generator=torch.Generator().manual_seed(8)) * 0.5
WEIGHTS = LossWeights()


def target_logits(hidden: Tensor) -> Tensor:
    return hidden @ HEAD.T


def batch_of(config: DrafterConfig, *lengths: int) -> BlockBatch:
    conversations, features = [], []
    for index, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(5 + index)
        ids = torch.randint(0, 250, (length,), generator=generator).tolist()
        conversations.append(conversation(ids, length // 2, index))
        taps = torch.randn((length, config.feature_size), generator=generator)
        features.append(Features(taps=taps, final_hidden=torch.randn((length, 64), generator=generator)))
    anchors = [anchor_candidates(c, config) for c in conversations]
    return build_blocks(conversations, features, anchors, config, device=CPU)


def backward(
    config: DrafterConfig, batch: BlockBatch, *, weights: LossWeights = WEIGHTS, chunk_slots: int = 256
) -> tuple[LossSums, dict[str, Tensor]]:
    module = DrafterModule.from_tensors(config, make_tensors(config))
    loss = DrafterLoss(module, target_logits, weights, chunk_slots=chunk_slots)
    sums = loss.backward(run_blocks(module, batch), batch, scale=0.25)
    return sums, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def reference(config: DrafterConfig, batch: BlockBatch) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Slot by slot over full vocabularies, one backward pass through everything."""
    module = DrafterModule.from_tensors(config, make_tensors(config))
    features = run_blocks(module, batch)
    kept = torch.arange(256) if module.target_ids is None else module.target_ids
    sums = {"ce": torch.zeros(()), "l1": torch.zeros(()), "confidence": torch.zeros(())}
    for block, slot in batch.is_supervised.nonzero().tolist():
        chosen = torch.zeros_like(batch.is_supervised)
        chosen[block, slot] = True
        draft = torch.zeros(256).scatter(0, kept, module.corrected_logits(features, chosen)[0].softmax(-1))
        row = int(batch.target_rows[block, slot])
        assert batch.final_hidden is not None and features.confidence_logits is not None
        distance = (draft - target_logits(batch.final_hidden[row]).softmax(-1)).abs().sum()
        weight = math.exp(-(slot - config.first_proposal_slot) / 4.0)
        label = int(batch.labels[block, slot])
        if label in kept.tolist():
            sums["ce"] = sums["ce"] - weight * draft[label].log()
        sums["l1"] = sums["l1"] + weight * distance
        goal = 1 - 0.5 * distance.detach()
        logit = features.confidence_logits[block, slot]
        sums["confidence"] = sums["confidence"] + weight * F.binary_cross_entropy_with_logits(logit, goal)
    (0.25 * (0.1 * sums["ce"] + 0.9 * sums["l1"] + 1.0 * sums["confidence"])).backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: float(value.detach()) for name, value in sums.items()}, gradients


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 100}, {"samples_from_anchor": False}])
def test_terms_and_gradients_equal_a_slot_by_slot_reference(changes: dict[str, int]) -> None:
    config = make_config(block_size=3, **changes)
    batch = batch_of(config, 12, 7)
    sums, gradients = backward(config, batch)
    expected, expected_gradients = reference(config, batch)
    assert float(sums.cross_entropy) == pytest.approx(expected["ce"], rel=1e-4)
    assert float(sums.l1) == pytest.approx(expected["l1"], rel=1e-4)
    assert float(sums.confidence) == pytest.approx(expected["confidence"], rel=1e-4)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("chunk_slots", [1, 7, 1000])
def test_any_chunk_size_gives_the_same_result(chunk_slots: int) -> None:
    """Case M6."""
    config = make_config(block_size=3, markov_head_type="rnn")
    batch = batch_of(config, 12, 7)
    sums, gradients = backward(config, batch, chunk_slots=chunk_slots)
    expected, expected_gradients = backward(config, batch, chunk_slots=5)
    torch.testing.assert_close(sums.flat(), expected.flat(), rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6)


def test_no_more_logits_exist_at_a_time_than_a_chunk_asks_for() -> None:
    """Case M6."""
    config = make_config(block_size=3)
    batch = batch_of(config, 30)
    assert int(batch.is_supervised.sum()) > 40
    rows_seen: list[int] = []

    def counting(hidden: Tensor) -> Tensor:
        rows_seen.append(len(hidden))
        return target_logits(hidden)

    module = DrafterModule.from_tensors(config, make_tensors(config))
    loss = DrafterLoss(module, counting, WEIGHTS, chunk_slots=8)
    loss.backward(run_blocks(module, batch), batch, scale=1.0)
    assert max(rows_seen) <= 8
    assert sum(rows_seen) < int(batch.is_supervised.sum())  # slots that are judged by the same row share its logits


def test_embedding_head_and_target_get_no_gradient() -> None:
    """Case M7."""
    config = make_config(block_size=3)
    batch = batch_of(config, 12)
    assert batch.final_hidden is not None
    batch = replace(batch, final_hidden=batch.final_hidden.requires_grad_())
    _, gradients = backward(config, batch)
    assert batch.final_hidden is not None and batch.final_hidden.grad is None
    assert not {"embed_tokens.weight", "lm_head.weight"} & gradients.keys()


def test_the_label_of_the_confidence_is_detached() -> None:
    """Case M7: with the confidence term alone nothing pulls the draft's distribution, so W2 gets no gradient."""
    config = make_config(block_size=3)
    weights = LossWeights(ce=0.0, l1=0.0, confidence=1.0)
    _, gradients = backward(config, batch_of(config, 12), weights=weights)
    assert not gradients["markov_head.markov_w2.weight"].any()
    assert gradients["confidence_head.proj.weight"].any()


def test_target_mass_outside_a_pruned_vocabulary_counts_as_lost_acceptance() -> None:
    """A draft equal to the target on its ids is accepted with exactly the target's mass on them."""
    config = make_config(block_size=3, draft_vocab_size=100, markov_rank=0, markov_head_type=None,
                         confidence_uses_markov=False)  # fmt: skip
    batch = batch_of(config, 12)
    module = DrafterModule.from_tensors(config, make_tensors(config))
    features = run_blocks(module, batch)
    kept = module.target_ids
    assert kept is not None

    def same_on_kept(hidden: Tensor) -> Tensor:
        logits = torch.full((len(hidden), 256), -100.0)
        logits[:, kept] = 0.0
        logits[:, 1] = math.log(100.0)  # id 1 cannot be proposed; it has half the mass
        return logits

    with torch.no_grad():
        features = replace(features, hidden=torch.zeros_like(features.hidden))  # uniform over the kept ids
    sums, *_ = DrafterLoss(module, same_on_kept, WEIGHTS, chunk_slots=64).measure(features, batch)
    assert (sums.acceptance / sums.num_slots).tolist() == pytest.approx([0.5] * 3)


def test_terms_that_need_the_final_hidden_state_refuse_to_drop_out() -> None:
    """Case M7."""
    config = make_config(block_size=3)
    batch = replace(batch_of(config, 12), final_hidden=None)
    with pytest.raises(ConfigError, match=r"l1_weight \(0.9\) and confidence_weight \(1.0\) need the target's"):
        backward(config, batch)


def test_cross_entropy_alone_needs_no_final_hidden_state() -> None:
    """Case M7."""
    config = make_config(block_size=3, has_confidence_head=False, confidence_uses_markov=False)
    batch = replace(batch_of(config, 12), final_hidden=None)
    sums, gradients = backward(config, batch, weights=LossWeights(l1=0.0))
    assert float(sums.cross_entropy) > 0
    assert float(sums.l1) == 0
    assert gradients["fc.weight"].any()


def test_blocks_without_a_supervised_slot_add_nothing() -> None:
    """Case M3."""
    config = make_config(block_size=3)
    batch = batch_of(config, 12)
    batch = replace(batch, is_supervised=torch.zeros_like(batch.is_supervised))
    sums, gradients = backward(config, batch)
    assert not sums.flat().any()
    assert gradients == {}


def test_a_text_without_anchors_beside_one_with_anchors_changes_no_gradient() -> None:
    """Case M3."""
    config = make_config(block_size=3)
    _, alone = backward(config, batch_of(config, 12))
    sums, both = backward(config, batch_of(config, 12, 1))
    assert torch.isfinite(sums.flat()).all()
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, alone[name])


def test_known_normalizers_give_the_loss_of_a_pruned_vocabulary_without_the_other_logits() -> None:
    config = make_config(block_size=3, draft_vocab_size=100)
    batch = batch_of(config, 20, 14)
    wanted, wanted_gradients = backward(config, batch)
    assert batch.final_hidden is not None
    known = replace(batch, log_normalizers=target_logits(batch.final_hidden).logsumexp(-1))
    module = DrafterModule.from_tensors(config, make_tensors(config))
    assert module.target_ids is not None
    rows = HEAD[module.target_ids]

    def refuse(hidden: Tensor) -> Tensor:
        raise AssertionError("the full head is not needed")

    loss = DrafterLoss(module, refuse, WEIGHTS, chunk_slots=256, kept_target_logits=lambda hidden: hidden @ rows.T)
    sums = loss.backward(run_blocks(module, known), known, scale=0.25)
    torch.testing.assert_close(sums.flat()[:6], wanted.flat()[:6], rtol=1e-5, atol=1e-5)
    for name, parameter in module.named_parameters():
        if name in wanted_gradients:
            torch.testing.assert_close(parameter.grad, wanted_gradients[name], rtol=1e-4, atol=1e-6)


def test_an_improbable_label_has_a_finite_loss_and_gradient() -> None:
    logits = torch.tensor([[0.0, 200.0, -300.0]], requires_grad=True)
    target = torch.tensor([[0.25, 0.5, 0.25]])
    cross_entropy, l1 = _DistributionTerms.apply(logits, torch.tensor([2]), target)
    (cross_entropy + l1).sum().backward()
    assert cross_entropy.tolist() == [500.0]
    assert l1.tolist() == [1.0]
    assert logits.grad is not None and logits.grad.tolist() == [[0.0, 1.0, -1.0]]
