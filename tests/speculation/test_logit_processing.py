"""Penalties, biases and bans: what each row of a verification sees, and the exact law of what then comes out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from enumerated_draws import completed, joint, verification_law

from dspark.request import SamplingParams
from dspark.speculation.logit_processing import LogitProcessor, logit_processor
from dspark.speculation.open_draft import OpenDraft, draw_next
from dspark.speculation.proposal import Draft, DraftContext
from dspark.speculation.sampling import target_probs
from dspark.speculation.verification import VerificationRow, verify_batch

PROMPT = [0, 2]
ALL_AT_ONCE = SamplingParams(
    temperature=0.8, min_p=0.05, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=-0.3,
    logit_bias={1: 0.7}, bad_token_ids=[3],
)  # fmt: skip
PARAMS = {
    "repetition": SamplingParams(repetition_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.9),
    "presence": SamplingParams(presence_penalty=1.3),
    "negative": SamplingParams(presence_penalty=-1.1, frequency_penalty=-0.4, repetition_penalty=0.7),
    "bias": SamplingParams(logit_bias={0: -1.5, 2: 2.0}),
    "ban": SamplingParams(logit_bias={1: -100}, temperature=1.5, min_p=0.3),
    "bad": SamplingParams(bad_token_ids=[0]),
    "allowed": SamplingParams(allowed_token_ids=[1, 3], top_p=0.9),
    "sequences": SamplingParams(bad_token_sequences=[[1, 1], [2, 0, 3], [0]]),
    "all": ALL_AT_ONCE,
}


def by_hand(logits: np.ndarray, sampling: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Return one row of logits after the changes, written out token by token."""
    changed = logits.astype(np.float64).copy()
    for token_id in range(len(changed)):
        if token_id in prompt or token_id in output:
            penalty = sampling.repetition_penalty
            changed[token_id] = changed[token_id] / penalty if changed[token_id] > 0 else changed[token_id] * penalty
        changed[token_id] -= sampling.frequency_penalty * output.count(token_id)
        changed[token_id] -= sampling.presence_penalty * (token_id in output)
        changed[token_id] += sampling.logit_bias.get(token_id, 0.0)
        is_allowed = sampling.allowed_token_ids is None or token_id in sampling.allowed_token_ids
        if not is_allowed or token_id in sampling.bad_token_ids or sampling.logit_bias.get(token_id) == -100:
            changed[token_id] = -math.inf
        after = [*output, token_id]
        if any(after[-len(sequence) :] == list(sequence) for sequence in sampling.bad_token_sequences):
            changed[token_id] = -math.inf
    return changed


def applied(processor: LogitProcessor, logits: np.ndarray, drafted: list[int]) -> np.ndarray:
    changed = torch.tensor(logits, dtype=torch.float32)
    processor.apply_(changed, drafted)
    return changed.numpy()


# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", PARAMS.values(), ids=PARAMS.keys())
def test_every_row_sees_the_committed_text_and_the_drafted_tokens_before_it(sampling):
    """E3"""
    generator = np.random.default_rng(1)
    for num_rounds in range(6):
        processor = LogitProcessor(sampling, prompt_token_ids=PROMPT)
        text = list(PROMPT)
        for _ in range(num_rounds):
            drafted = generator.integers(0, 4, generator.integers(0, 4)).tolist()
            logits = generator.standard_normal((len(drafted) + 1, 4))
            changed = applied(processor, logits, drafted)
            for k, row in enumerate(logits):
                expected = by_hand(row, sampling, PROMPT, text[2:] + drafted[:k])
                np.testing.assert_allclose(changed[k], expected, rtol=1e-5, atol=1e-6)
            # Some of the draft is committed, and a token that was not drafted.
            text += [*drafted[: generator.integers(0, len(drafted) + 1)], int(generator.integers(0, 4))]
            processor.follow(text)


def test_counts_of_a_rejected_draft_are_gone():
    """E3: constant logits (1.0, 0.9, 0.4), presence penalty 0.3; the drafter is right once, then wrong."""
    processor = LogitProcessor(SamplingParams(temperature=0, presence_penalty=0.3), prompt_token_ids=[2])
    constant = np.tile([1.0, 0.9, 0.4], (4, 1))
    np.testing.assert_allclose(
        applied(processor, constant, [0, 2, 2]),
        [[1.0, 0.9, 0.4], [0.7, 0.9, 0.4], [0.7, 0.9, 0.1], [0.7, 0.9, 0.1]],
        atol=1e-6,
    )
    processor.follow([2, 0, 1])
    np.testing.assert_allclose(applied(processor, constant[:1], []), [[0.7, 0.6, 0.4]], atol=1e-6)


def test_the_prompt_counts_for_the_repetition_penalty_alone():
    sampling = SamplingParams(repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=1.0)
    processor = LogitProcessor(sampling, prompt_token_ids=[0, 0, 1])
    np.testing.assert_allclose(applied(processor, np.array([[3.0, -3.0, 3.0]]), []), [[1.5, -6.0, 3.0]])


def test_the_last_row_alone_is_the_last_row_of_all():
    """Drafters ask for one row at a time."""
    processor = LogitProcessor(ALL_AT_ONCE, prompt_token_ids=PROMPT)
    processor.follow([*PROMPT, 1, 1, 2])
    logits = np.random.default_rng(2).standard_normal((4, 4))
    together = applied(processor, logits, [0, 3, 0])
    for k in range(4):
        np.testing.assert_array_equal(applied(processor, logits[k : k + 1], [0, 3, 0][:k])[0], together[k])


def test_a_text_with_many_different_tokens_is_counted():
    processor = LogitProcessor(SamplingParams(frequency_penalty=1.0), prompt_token_ids=[0])
    processor.follow([0, *range(1000), *range(500)])
    changed = applied(processor, np.zeros((1, 1001)), [])
    np.testing.assert_array_equal(changed[0], [-2.0] * 500 + [-1.0] * 500 + [0.0])


def test_a_banned_token_never_comes_out_however_likely():
    """E4: a bias of -100 is a ban, not a summand."""
    processor = LogitProcessor(SamplingParams(logit_bias={0: -100, 1: 100}), prompt_token_ids=[0])
    assert applied(processor, np.array([[1e6, 0.0, 0.0]]), []).tolist() == [[-math.inf, 100.0, 0.0]]


def test_a_bad_sequence_that_began_in_the_prompt_may_end():
    sampling = SamplingParams(bad_token_sequences=[[0, 1]])
    processor = LogitProcessor(sampling, prompt_token_ids=[0])
    assert applied(processor, np.zeros((2, 2)), [0]).tolist() == [[0.0, 0.0], [0.0, -math.inf]]


def test_other_requests_get_no_processor():
    assert (
        logit_processor(SamplingParams(temperature=0, top_k=3, min_tokens=4, logprobs=2), prompt_token_ids=[1]) is None
    )
    assert all(logit_processor(p, prompt_token_ids=[1]) is not None for p in PARAMS.values())


# -- the law -------------------------------------------------------------------------------------------------------

TARGET = np.random.default_rng(5).standard_normal((5, 4)) * 1.5
DRAFT = np.random.default_rng(6).dirichlet(np.ones(4), size=5)


def target_logits(prefix: tuple[int, ...]) -> np.ndarray:
    return TARGET[prefix[-1] if prefix else 4]


def expected_probs(sampling: SamplingParams) -> Callable[[tuple[int, ...]], np.ndarray]:
    def probs(prefix: tuple[int, ...]) -> np.ndarray:
        changed = by_hand(target_logits(prefix), sampling, PROMPT, list(prefix))
        return target_probs(torch.tensor(changed, dtype=torch.float32)[None], [sampling])[0][0].numpy()

    return probs


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("method", ["rejection", "block"])
@pytest.mark.parametrize("sampling", PARAMS.values(), ids=PARAMS.keys())
def test_what_comes_out_has_the_law_of_the_changed_target(sampling, method, is_deterministic):
    """E1, E3, E4: summed over all drafts of two tokens, all coins and all draws."""
    likely = np.eye(4)[DRAFT.argmax(axis=1)] if is_deterministic else DRAFT
    _, emitted = verification_law(
        target_logits,
        lambda prefix: likely[prefix[-1] if prefix else 4],
        length=2,
        method=method,
        sampling=sampling,
        is_deterministic=is_deterministic,
        prompt=PROMPT,
    )
    probs = expected_probs(sampling)
    law = completed(emitted, probs, length=3)
    assert np.abs(law - joint(probs, (), length=3)).max() < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_coupled_and_greedy_rows_give_the_tokens_of_one_row_at_a_time(temperature):
    """Every draft of three tokens: what is emitted is the beginning of plain decoding with the same noise."""
    sampling = SamplingParams(
        temperature=temperature, seed=3, presence_penalty=0.8, repetition_penalty=1.3, logit_bias={2: 0.5}
    )

    def verified(text: list[int], drafted: list[int]) -> list[int]:
        processor = LogitProcessor(sampling, prompt_token_ids=PROMPT)
        processor.follow(text)
        logits = np.stack([target_logits((*text[2:], *drafted[:k])) for k in range(len(drafted) + 1)])
        row = VerificationRow(
            draft=Draft(token_ids=drafted), sampling=sampling, seed=3, method="coupled", anchor_position=len(text) - 1,
            logit_processor=processor,
        )  # fmt: skip
        return verify_batch(torch.tensor(logits, dtype=torch.float32), [row])[0].token_ids

    text = list(PROMPT)
    for _ in range(4):
        text += verified(text, [])
    for drafted in itertools.product(range(4), repeat=3):
        emitted = verified(list(PROMPT), list(drafted))
        assert emitted == text[2 : 2 + len(emitted)]


# -- drafters ------------------------------------------------------------------------------------------------------


def open_draft(sampling: SamplingParams, drafted: list[int]) -> OpenDraft:
    context = DraftContext(
        request_id="r", token_ids=PROMPT, sampling=sampling, seed=1, is_coupled=False, num_draft_tokens=4,
        page_ids=[0], page_serials=[0], logit_processor=logit_processor(sampling, prompt_token_ids=PROMPT),
    )  # fmt: skip
    return OpenDraft(context=context, length=4, token_ids=list(drafted), probs=[torch.zeros(4)] * len(drafted))


@pytest.mark.parametrize("sampling", PARAMS.values(), ids=PARAMS.keys())
def test_a_drafter_draws_from_logits_that_are_changed_as_the_targets_are(sampling):
    logits = torch.tensor(TARGET[:2], dtype=torch.float32)
    draft, other = open_draft(sampling, [1, 1]), open_draft(SamplingParams(), [1, 1])
    before = logits.clone()
    assert draw_next([draft, other], logits, vocab_size=4) == [True, True]
    assert torch.equal(logits, before)
    changed = torch.tensor(by_hand(TARGET[0], sampling, PROMPT, [1, 1]), dtype=torch.float32)
    torch.testing.assert_close(draft.probs[-1], target_probs(changed[None], [sampling])[0][0])
    torch.testing.assert_close(other.probs[-1], torch.softmax(logits[1], dim=-1))


def test_a_pruned_head_is_changed_at_the_targets_ids():
    target_ids = torch.tensor([3, 1])
    draft = open_draft(SamplingParams(logit_bias={3: -100}), [])
    draw_next([draft], torch.tensor([[9.0, 0.0]]), vocab_size=4, target_ids=target_ids)
    assert (draft.token_ids, draft.probs[0].tolist()) == ([1], [0.0, 1.0, 0.0, 0.0])


def test_a_pruned_head_without_any_allowed_id_goes_on_drafting():
    """Its drafts are rejected; it must not be taken for broken."""
    draft = open_draft(SamplingParams(allowed_token_ids=[0]), [])
    assert draw_next([draft], torch.tensor([[9.0, 0.0]]), vocab_size=4, target_ids=torch.tensor([3, 1])) == [True]
    broken = open_draft(SamplingParams(allowed_token_ids=[0]), [])
    assert draw_next([broken], torch.full((1, 4), math.nan), vocab_size=4) == [False]
