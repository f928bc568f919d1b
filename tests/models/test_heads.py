"""The sequential and confidence heads equal their definitions; they read target ids and write draft ids."""

from __future__ import annotations

import math

import pytest
import torch
from drafter_cases import make_config, make_tensors
from torch import Tensor

from dspark.models.drafter import Drafter
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_module import DrafterModule
from dspark.models.heads import SequentialHead

PREVIOUS = [[7, 20], [31, 9], [4, 4], [250, 0], [12, 13]]  # [slot][request]
HIDDEN = torch.randn((2, 5, 64), generator=torch.Generator().manual_seed(11))


def recurrence(tensors: dict[str, Tensor], previous: list[int], hidden: Tensor) -> list[Tensor]:
    """The recurrent head of one block, element by element; hidden [B, D]. Returns the bias [Vd] of each slot."""
    weight, offset = tensors["markov_head.joint_proj.weight"], tensors["markov_head.joint_proj.bias"]
    rank = weight.shape[0] // 3
    state, biases = [0.0] * rank, []
    for slot, token in enumerate(previous):
        embedded = tensors["markov_head.markov_w1.weight"][token].tolist()
        joint = (weight @ torch.tensor(state + embedded + hidden[slot].tolist()) + offset).tolist()
        gates = [1 / (1 + math.exp(-g)) for g in joint[:rank]]
        candidates = [math.tanh(c) for c in joint[rank : 2 * rank]]
        state = [g * s + (1 - g) * c for g, s, c in zip(gates, state, candidates, strict=True)]
        outputs = torch.tensor([math.tanh(o) for o in joint[2 * rank :]])
        biases.append(tensors["markov_head.markov_w2.weight"] @ outputs)
    return biases


@pytest.mark.parametrize("samples_from_anchor", [True, False])
def test_recurrent_head_equals_the_recurrence(samples_from_anchor: bool) -> None:
    """With fill-in the state has already seen slot 0, whose predecessor is the anchor."""
    config = make_config(markov_head_type="rnn", samples_from_anchor=samples_from_anchor)
    tensors = make_tensors(config)
    anchors = PREVIOUS[0]
    previous = PREVIOUS if samples_from_anchor else [anchors, anchors, *PREVIOUS[2:]]
    expected = [recurrence(tensors, [slot[request] for slot in previous], HIDDEN[request]) for request in range(2)]
    with torch.inference_mode():
        steps = SequentialHead(config, tensors).begin(HIDDEN, torch.tensor(anchors))
        for slot in range(config.first_proposal_slot, 5):
            bias, _ = steps.step(torch.tensor(previous[slot]))
            assert bias is not None
            for request in range(2):
                torch.testing.assert_close(bias[request], expected[request][slot], atol=1e-5, rtol=1e-5)


def module_features(config: DrafterConfig, tensors: dict[str, Tensor], previous: list[list[int]]) -> Tensor:
    module = DrafterModule.from_tensors(config, tensors)
    assert module.markov_head is not None
    with torch.no_grad():
        _, latent = module.markov_head(torch.tensor(previous).T, HIDDEN)
        return module.bias(latent)  # [2, 5, Vd]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_steps_equal_the_module(kind: str) -> None:
    config = make_config(markov_head_type=kind)
    tensors = make_tensors(config)
    expected = module_features(config, tensors, PREVIOUS)
    with torch.inference_mode():
        steps = SequentialHead(config, tensors).begin(HIDDEN, torch.tensor(PREVIOUS[0]))
        for slot in range(5):
            bias, _ = steps.step(torch.tensor(PREVIOUS[slot]))
            torch.testing.assert_close(bias, expected[:, slot], atol=1e-5, rtol=1e-5)


def test_gated_head_gates_the_embedding_by_the_hidden_state_first() -> None:
    config = make_config(markov_head_type="gated")
    tensors = make_tensors(config)
    embedded = tensors["markov_head.markov_w1.weight"][7]
    gate = torch.sigmoid(
        tensors["markov_head.gate_proj.weight"] @ torch.cat([HIDDEN[0, 0], embedded])
        + tensors["markov_head.gate_proj.bias"]
    )
    expected = tensors["markov_head.markov_w2.weight"] @ (gate * embedded)
    with torch.inference_mode():
        bias, _ = SequentialHead(config, tensors).begin(HIDDEN, torch.tensor([7, 20])).step(torch.tensor([7, 20]))
    assert bias is not None
    torch.testing.assert_close(bias[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("uses_markov", [True, False])
def test_confidence_reads_the_hidden_state_and_perhaps_the_predecessor(uses_markov: bool) -> None:
    config = make_config(confidence_uses_markov=uses_markov)
    tensors = make_tensors(config)
    weight, offset = tensors["confidence_head.proj.weight"][0], tensors["confidence_head.proj.bias"][0]
    inputs = HIDDEN[1, 0]
    if uses_markov:
        inputs = torch.cat([inputs, tensors["markov_head.markov_w1.weight"][20]])
    with torch.inference_mode():
        steps = SequentialHead(config, tensors).begin(HIDDEN, torch.tensor([7, 20]))
        _, confidence = steps.step(torch.tensor([7, 20]))
    assert confidence is not None
    torch.testing.assert_close(confidence[1], weight @ inputs + offset, atol=1e-5, rtol=1e-5)


def test_without_heads_there_is_no_bias_and_no_confidence() -> None:
    config = make_config(markov_rank=0, markov_head_type=None, has_confidence_head=False, confidence_uses_markov=False)
    steps = SequentialHead(config, make_tensors(config)).begin(HIDDEN, torch.tensor([7, 20]))
    assert steps.step(torch.tensor([7, 20])) == (None, None)


def test_a_step_past_the_block_is_our_mistake() -> None:
    config = make_config(block_size=1)
    steps = SequentialHead(config, make_tensors(config)).begin(HIDDEN[:, :1], torch.tensor([7, 20]))
    with torch.inference_mode():
        steps.step(torch.tensor([7, 20]))
        with pytest.raises(AssertionError):
            steps.step(torch.tensor([7, 20]))


def test_pruned_vocabulary_is_read_in_target_ids_and_mapped_once() -> None:
    """Case I4: ids [3, 5, 9] of 10; W1 and W2 say 0 -> 5 -> 9 -> 3.

    Reading W1 by draft ids, or mapping twice, gives others.
    """
    config = make_config(
        vocab_size=10,
        draft_vocab_size=3,
        mask_token_id=1,
        markov_rank=4,
        block_size=3,
        has_confidence_head=False,
        confidence_uses_markov=False,
    )
    next_draft_id = {0: 1, 5: 2, 9: 0}
    tensors = make_tensors(config)
    tensors["d2t"] = torch.tensor([3, 4, 7])
    tensors["lm_head.weight"].zero_()
    w1, w2 = torch.zeros(10, 4), torch.eye(4)[:3]
    w1[:, 3] = 1.0  # a column W2 does not read
    for token, draft_id in next_draft_id.items():
        w1[token] = torch.eye(4)[draft_id]
    tensors |= {"markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2}
    drafter = Drafter(config, tensors)
    previous, chain = torch.tensor([0]), []
    with torch.inference_mode():
        steps = drafter.sequential_head.begin(HIDDEN[:1, :3], previous)
        for _ in range(3):
            bias, _ = steps.step(previous)
            assert bias is not None
            assert bias.shape == (1, 3)
            previous = drafter.to_target_ids(bias.argmax(-1))
            chain.append(previous.item())
    assert chain == [5, 9, 3]
