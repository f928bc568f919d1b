"""The exact law of what verification emits, integrated over every coin and draw, against the target's own law."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from enumerated_draws import completed, joint, verification_law

from dspark.request import SamplingParams
from dspark.speculation.sampling import target_probs

FIXTURE = Path(__file__).parents[1] / "fixtures" / "algorithms" / "verification_rules.json"
RULES = json.loads(FIXTURE.read_text())
RULE_OF_METHOD = {"rejection": "token", "block": "block"}
METHODS = tuple(RULE_OF_METHOD)


def log(p) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.asarray(p, dtype=np.float64))


def rows_of(instance, name):
    """Return prefix -> distribution for a fixture instance, context-free or first-order."""
    if name in instance:
        return lambda prefix: np.array(instance[name])
    rows = np.array(instance[f"{name}_rows"])
    return lambda prefix: rows[prefix[-1] if prefix else len(rows) - 1]


def random_rows(vocab_size: int, seed: int, num_zeros: int = 0):
    """Return prefix -> one of V+1 random distributions, chosen by the last token."""
    generator = np.random.default_rng(seed)
    rows = generator.dirichlet(np.full(vocab_size, 0.7), size=vocab_size + 1)
    for row in rows:
        row[generator.choice(vocab_size, size=num_zeros, replace=False)] = 0
    rows /= rows.sum(axis=1, keepdims=True)
    return lambda prefix: rows[prefix[-1] if prefix else vocab_size]


def processed(rows, sampling: SamplingParams):
    """Return prefix -> float32 probabilities after the request's own filters."""

    def probs(prefix):
        logits = torch.tensor(log(rows(prefix)), dtype=torch.float32).unsqueeze(0)
        return target_probs(logits, [sampling])[0][0].numpy()

    return probs


def one_hot_rows(vocab_size: int, choose):
    return lambda prefix: np.eye(vocab_size)[choose(prefix)]


def assert_lossless(target, draft, *, length, method, sampling=None, is_deterministic=False):
    sampling = sampling or SamplingParams()
    expected = processed(target, sampling)
    _, emitted = verification_law(
        lambda prefix: log(target(prefix)),
        draft,
        length=length,
        method=method,
        sampling=sampling,
        is_deterministic=is_deterministic,
    )
    law = completed(emitted, expected, length=length + 1)
    assert np.abs(law - joint(expected, (), length=length + 1)).max() < 1e-6


ALL_INSTANCES = RULES["instances"] + RULES["context_instances"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("instance", ALL_INSTANCES, ids=lambda i: f"{i['kind']}-{i['id']}")
def test_accepted_lengths_and_first_tokens_have_the_published_probabilities(instance, method):
    target = rows_of(instance, "p")
    accepted, emitted = verification_law(
        lambda prefix: log(target(prefix)), rows_of(instance, "q"), length=instance["gamma"], method=method
    )
    expected = instance[RULE_OF_METHOD[method]]
    assert accepted == pytest.approx(expected["accepted_distribution"], abs=2e-6)
    assert accepted @ np.arange(4) == pytest.approx(expected["expected_accepted"], abs=5e-6)
    first = np.zeros(instance["vocab"])
    for tokens, probability in emitted.items():
        first[tokens[0]] += probability
    assert first == pytest.approx(expected["first_token"], abs=2e-6)
    law = completed(emitted, target, length=4)
    assert np.abs(law - joint(target, (), length=4)).max() < 2e-6


def test_the_published_example_gains_a_ninth_of_a_token_by_blocks():
    p, q = (np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3]))
    for method, expected in (("rejection", 10 / 9), ("block", 11 / 9)):
        accepted, _ = verification_law(lambda _: log(p), lambda _: q, length=2, method=method)
        assert accepted @ np.arange(3) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_block_never_accepts_less_than_the_token_rule(seed):
    target, draft = random_rows(3, seed), random_rows(3, seed + 100)
    tails = []
    for method in METHODS:
        accepted, _ = verification_law(lambda prefix: log(target(prefix)), draft, length=3, method=method)
        tails.append(np.cumsum(accepted[::-1])[::-1])  # P(accepted >= k)
    assert tails[1] @ np.ones(4) >= tails[0] @ np.ones(4) - 1e-6
    assert (tails[1] >= tails[0] - 1e-6)[-1]  # the whole block in particular


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("vocab_size", [3, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_soft_drafts_of_any_length_keep_the_law(length, vocab_size, method):
    target, draft = random_rows(vocab_size, 1, num_zeros=1), random_rows(vocab_size, 2)
    assert_lossless(target, draft, length=length, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_deterministic_drafts_keep_the_law(length, method):
    target = random_rows(4, 3, num_zeros=1)
    draft = one_hot_rows(4, lambda prefix: (sum(prefix) * 2 + len(prefix) + 1) % 4)
    assert_lossless(target, draft, length=length, method=method, is_deterministic=True)


@pytest.mark.parametrize("method", METHODS)
def test_a_deterministic_draft_is_judged_like_its_one_hot_vectors(method):
    target = random_rows(4, 5)
    draft = one_hot_rows(4, lambda prefix: len(prefix))
    laws = [
        verification_law(
            lambda prefix: log(target(prefix)), draft, length=3, method=method, is_deterministic=is_deterministic
        )
        for is_deterministic in (True, False)
    ]
    assert laws[0][0] == pytest.approx(laws[1][0], abs=1e-6)
    assert laws[0][1] == pytest.approx(laws[1][1], abs=1e-6)


SETTINGS = [
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=2),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.4),
    SamplingParams(temperature=1.5, top_k=3, top_p=0.8, min_p=0.1),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
def test_the_law_is_that_of_the_requests_own_filters(sampling, method):
    """Case B6; the drafter filters its own logits in the same way."""
    target, draft_logits = random_rows(4, 7), random_rows(4, 8)
    assert_lossless(target, processed(draft_logits, sampling), length=2, method=method, sampling=sampling)


def first_token_law(p, q, *, method, sampling=None, length=2) -> np.ndarray:
    _, emitted = verification_law(
        lambda _: log(p), lambda _: np.array(q), length=length, method=method, sampling=sampling
    )
    first = np.zeros(len(p))
    for tokens, probability in emitted.items():
        first[tokens[0]] += probability
    return first


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_equal_to_the_target_is_always_accepted(method):
    """Case B1: ratio acceptance with q = p accepts everything at temperature 1."""
    p = [0.4, 0.3, 0.2, 0.1]
    q = processed(lambda _: np.array(p), SamplingParams())
    accepted, _ = verification_law(lambda _: log(p), q, length=3, method=method)
    assert accepted.tolist() == pytest.approx([0, 0, 0, 1], abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_filtered_draft_leaves_the_targets_law(method):
    """Case B2: q = the vector left by temperature .7 and top_p .6, the target uniform."""
    q_logits = torch.tensor([[2.0, 1.0, 0.5, 0.1]])
    q = target_probs(q_logits, [SamplingParams(temperature=0.7, top_p=0.6)])[0][0].numpy()
    assert first_token_law([0.25] * 4, q, method=method) == pytest.approx([0.25] * 4, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_from_bfloat16_logits_leaves_the_targets_law(method):
    """Case B3: the float32 softmax of the rounded logits is the one q that is drawn from and judged."""
    logits = torch.linspace(8.0, 8.06, 4).to(torch.bfloat16).float().unsqueeze(0)
    q = target_probs(logits, [SamplingParams()])[0][0].numpy()
    p = [0.4, 0.3, 0.2, 0.1]
    assert first_token_law(p, q, method=method) == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_the_token_after_a_rejection_comes_from_the_residual(method):
    """Case B5: drawing from p after a rejection would give (.26, .32, .28, .14)."""
    p, q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]
    assert first_token_law(p, q, method=method) == pytest.approx(p, abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_and_top_k_reach_the_verifier(method, temperature):
    """Case B6: p logits (2, 1, 0), top_k 2."""
    e = math.exp(1 / temperature)
    p = np.exp([2.0, 1.0, 0.0])
    law = first_token_law(p, [0.2, 0.3, 0.5], method=method, sampling=SamplingParams(temperature=temperature, top_k=2))
    assert law == pytest.approx([e / (1 + e), 1 / (1 + e), 0.0], abs=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_outside_the_draft_vocabulary_keep_their_probability(method):
    """Case B15: the drafter only knows the ids 0, 2 and 4."""
    p, third = [0.1, 0.3, 0.1, 0.3, 0.1, 0.1], 1 / 3
    q = [third, 0, third, 0, third, 0]
    assert first_token_law(p, q, method=method) == pytest.approx(p, abs=1e-6)
