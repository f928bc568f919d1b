"""Simulated rounds: the exact law of served ones on a small vocabulary, and the walk along a greedy text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from drafter_cases import make_config, make_tensors
from training_cases import conversation

from dspark.models.autoregressive_module import AutoregressiveModule
from dspark.models.drafter_config import DrafterConfig
from dspark.models.drafter_module import DrafterModule
from dspark.training.checkpoint import TrainedModule
from dspark.training.dataset import Conversation
from dspark.training.features import Features
from dspark.training.simulated_rounds import TextAcceptance, acceptance_along, answer_spans, expected_rounds

TARGET = np.array([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.3, 0.6, 0.1]])  # next token by the previous one
DRAFTER = (  # by slot, then by the previous token
    np.array([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [0.25, 0.5, 0.25]]),
    np.array([[0.6, 0.2, 0.2], [0.1, 0.2, 0.7], [0.9, 0.05, 0.05]]),
)
NUM_PROPOSALS = len(DRAFTER)


def law_of_serving(previous: int, num_left: int) -> np.ndarray:
    """Return the expected [rounds, reached 1, reached 2, accepted 1, accepted 2] of rejection sampling, enumerated."""
    expected = np.zeros(1 + 2 * NUM_PROPOSALS)
    if not num_left:
        return expected
    expected[0] = 1
    length = min(NUM_PROPOSALS, num_left - 1)

    def go_on(k: int, before: int, chance: float) -> None:
        nonlocal expected
        q = TARGET[before]
        if k == length:
            for token in range(3):
                expected += chance * q[token] * law_of_serving(token, num_left - k - 1)
            return
        p = DRAFTER[k][before]
        expected[1 + k] += chance
        expected[1 + NUM_PROPOSALS + k] += chance * np.minimum(p, q).sum()
        for token in range(3):
            go_on(k + 1, token, chance * min(p[token], q[token]))
            expected += chance * max(q[token] - p[token], 0) * law_of_serving(token, num_left - k - 1)

    go_on(0, previous, 1.0)
    return expected


def test_sampled_rounds_are_the_exact_expectation_of_served_ones():
    """All texts of five tokens with their probabilities, against all outcomes of serving them."""
    num_tokens = 5
    total = np.zeros(1 + 2 * NUM_PROPOSALS)
    for text in itertools.product(range(3), repeat=num_tokens):
        probability = TARGET[0][text[0]]
        for before, token in itertools.pairwise(text):
            probability *= TARGET[before][token]
        acceptance = np.zeros((num_tokens - 1, NUM_PROPOSALS))
        for anchor, k in np.ndindex(acceptance.shape):
            if anchor + k + 1 < num_tokens:
                before, token = text[anchor + k], text[anchor + k + 1]
                acceptance[anchor, k] = min(1, DRAFTER[k][before][token] / TARGET[before][token])
        counts = expected_rounds(acceptance, is_ended=False)
        total += probability * np.array([counts.num_rounds, *counts.reached, *counts.accepted])
    expected = sum(TARGET[0][first] * law_of_serving(first, num_tokens - 1) for first in range(3))
    assert total == pytest.approx(expected, abs=1e-12)


def test_greedy_rounds_walk_along_the_text():
    """Six tokens: a round accepts 2 and moves on by 3; one accepts none, moves on by 1; the last token has no draft."""
    acceptance = np.zeros((5, 2))
    acceptance[0] = 1, 1
    acceptance[1] = 1, 1  # never visited
    acceptance[3] = 0, 1  # right behind a wrong one: not reached
    counts = expected_rounds(acceptance, is_ended=False)
    assert (counts.num_texts, counts.num_rounds, counts.num_emitted) == (1, 3, 5)
    assert counts.reached == [2, 1]
    assert counts.accepted == [1, 1]


def test_a_draft_reaches_up_to_the_end_token_and_up_to_one_token_before_a_limit():
    acceptance = np.ones((3, 3))
    ended, limited = (expected_rounds(acceptance, is_ended=is_ended) for is_ended in (True, False))
    assert (ended.num_rounds, ended.num_emitted, ended.accepted) == (1, 3, [1, 1, 1])
    assert (limited.num_rounds, limited.num_emitted, limited.accepted) == (1, 3, [1, 1, 0])


def test_each_answer_of_a_conversation_is_a_span():
    one = Conversation(
        index=0,
        token_ids=np.arange(8),
        is_supervised=np.array([0, 1, 1, 0, 0, 1, 0, 1], dtype=bool),
        is_held_out=False,
    )
    assert answer_spans(one) == [(1, 3), (5, 6), (7, 8)]
    assert answer_spans(conversation([1, 2, 3], 3)) == []


ALONE = {"markov_rank": 0, "markov_head_type": None, "has_confidence_head": False, "confidence_uses_markov": False}


def uniform_drafter(config: DrafterConfig) -> DrafterModule:
    """Return a drafter that finds every token equally likely; its argmax is any of them."""
    tensors = make_tensors(config)
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in tensors:
            tensors[name] = torch.zeros_like(tensors[name])
    return DrafterModule.from_tensors(config, tensors)


def along(module: TrainedModule, text: list[int], probs: torch.Tensor) -> TextAcceptance:
    """Return the acceptance along `text`, of which the target said all, with the same distribution everywhere."""

    def features(pack: object) -> list[Features]:
        taps = torch.zeros(len(text), module.config.feature_size)
        return [Features(taps=taps, final_hidden=torch.zeros(len(text), 1))]

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return probs.log().expand(len(hidden), -1)

    return acceptance_along(module, conversation(text, 1), (1, len(text)), features, logits)


SKEWED = torch.full((256,), 0.5 / 255)
SKEWED[7] = 0.5


def test_a_proposal_that_came_out_was_accepted_with_the_ratio_of_its_probabilities() -> None:
    """A uniform draft, 1 / 256: token 7 has 1/2 in the target, the others less than the draft gives them."""
    got = along(uniform_drafter(make_config(block_size=2)), [0, 3, 7, 9], SKEWED)
    assert got.sampled == pytest.approx(np.array([[2 / 256, 1], [1, 0]]))
    assert not got.is_argmax
    assert along(uniform_drafter(make_config(block_size=2)), [0, 3, 7, 7], SKEWED).is_argmax  # but for the first token


def test_a_text_of_one_token_has_no_round() -> None:
    got = along(uniform_drafter(make_config(block_size=2)), [0, 3], SKEWED)
    counts = expected_rounds(got.sampled, is_ended=True)
    assert (counts.num_texts, counts.num_rounds, counts.num_emitted, counts.reached) == (1, 0, 0, [0, 0])


def test_a_token_outside_the_draft_vocabulary_is_never_accepted() -> None:
    """The draft ids are the even ones, each with 1 / 128."""
    got = along(uniform_drafter(make_config(block_size=2, draft_vocab_size=128)), [0, 4, 8, 7], SKEWED)
    assert got.sampled.tolist() == [[1, 0], [0, 0]]
    assert got.greedy[:, 1].tolist() == [0, 0]
    assert got.greedy[1, 0] == 0


def test_a_parallel_drafter_is_accepted_where_its_argmax_came_out_for_that_is_what_it_proposes() -> None:
    module = DrafterModule.from_tensors(
        make_config(block_size=2, **ALONE), make_tensors(make_config(block_size=2, **ALONE))
    )
    got = along(module, [0, 3, 7, 9], SKEWED)
    assert got.sampled.tolist() == got.greedy.tolist()


def test_the_autoregressive_baseline_draws_and_is_accepted_by_the_ratio() -> None:
    config = make_config(block_size=2, num_layers=1, windows=(None,), is_causal=(False,), **ALONE)
    module = AutoregressiveModule(config)
    torch.nn.init.zeros_(module.lm_head.weight)
    assert along(module, [0, 3, 7, 9], SKEWED).sampled == pytest.approx(np.array([[2 / 256, 1], [1, 0]]))
