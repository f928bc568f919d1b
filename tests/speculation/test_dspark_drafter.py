"""The DSpark proposer on its own: what it draws, from which vectors, with which noise."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drafter_cases import FIXTURES, draft_with_module, load_module
from dspark_bench import VOCAB, fresh_context, fresh_greedy_draft, make_drafter, stored_drafter, target_taps

from dspark.models.drafter import Drafter
from dspark.request import SamplingParams
from dspark.speculation.dspark_drafter import FEATURES_PER_WRITE, DSparkProposer
from dspark.speculation.noise import KeyedNoise, NoisePurpose
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import NO_DRAFT, CommittedFeatures, Draft, DraftContext
from dspark.speculation.sampling import race, sample_from, target_probs

GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
TEXT = [5, 40, 7, 200, 31, 99, 12, 3, 77, 150, 21]
OTHER = [8, 8, 1, 250, 66]
SEED = 11


def proposer_with(drafter: Drafter, texts: dict[str, list[int]]) -> tuple[DSparkProposer, dict[str, range]]:
    """Return a proposer that has the context of `texts`, and their pages."""
    proposer = DSparkProposer(drafter, num_pages=64, page_size=4)
    pages = {}
    for i, (request_id, text) in enumerate(texts.items()):
        pages[request_id] = range(16 * i, 16 * (i + 1))
        positions = torch.arange(len(text) - 1)
        taps = target_taps(text[:-1], drafter.config.tap_ids)
        proposer.take_features(committed(taps, positions, positions + 64 * i))
    return proposer, pages


def test_features_are_written_when_a_pass_needs_them_or_enough_have_come_together() -> None:
    drafter = make_drafter()
    proposer, pages = proposer_with(drafter, {"a": TEXT})
    pool = proposer._kv_cache.pools[0]
    assert not pool.any()
    proposer.propose([replace(context_of(TEXT, pages["a"]), joins_pass=False)])
    assert not pool.any()
    (draft,) = proposer.propose([context_of(TEXT, pages["a"])])
    assert pool.any()
    assert draft.token_ids == fresh_greedy_draft(drafter, TEXT, 4)

    proposer = DSparkProposer(drafter, num_pages=64, page_size=4)
    positions = torch.arange(FEATURES_PER_WRITE)
    taps = target_taps([1] * FEATURES_PER_WRITE, drafter.config.tap_ids)
    proposer.take_features(committed(taps[1:], positions[1:], positions[1:]))
    assert not proposer._kv_cache.pools[0].any()
    proposer.take_features(committed(taps[:1], positions[:1], positions[:1]))
    assert proposer._kv_cache.pools[0].any()


def test_a_page_that_changes_its_owner_before_it_is_written_holds_the_new_owners_keys_alone() -> None:
    """The first owner's row of position 2 is NaN, which masked attention would spread to the second's draft."""
    drafter = make_drafter()
    proposer = DSparkProposer(drafter, num_pages=64, page_size=4)
    broken = torch.full((3, len(drafter.config.tap_ids) * drafter.config.target_hidden_size), float("nan"))
    proposer.take_features(committed(broken, torch.arange(3), torch.arange(3), [0]))
    taps = target_taps(OTHER[:2], drafter.config.tap_ids)
    proposer.take_features(committed(taps, torch.arange(2), torch.arange(2), [0]))

    (draft,) = proposer.propose([context_of(OTHER[:3], range(16))])

    assert draft.token_ids == fresh_greedy_draft(drafter, OTHER[:3], 4)


def committed(taps, positions, slots, new_page_ids=()) -> CommittedFeatures:
    return CommittedFeatures(
        features=taps,
        positions=positions,
        slot_mapping=slots,
        new_page_ids=torch.tensor(new_page_ids, dtype=torch.int64),
    )


def context_of(text, pages, *, length=4, sampling=GREEDY, is_coupled=False, request_id="a") -> DraftContext:
    return DraftContext(
        request_id=request_id,
        token_ids=text,
        sampling=sampling,
        seed=SEED,
        is_coupled=is_coupled,
        num_draft_tokens=length,
        page_ids=pages,
        page_serials=[1] * len(pages),
    )


def draft_one(drafter: Drafter, **fields) -> Draft:
    proposer, pages = proposer_with(drafter, {"a": TEXT})
    (draft,) = proposer.propose([context_of(TEXT, pages["a"], **fields)])
    return draft


def corrected_logits(drafter: Drafter, target_ids: list[int]) -> torch.Tensor:
    """Return the logits [k, Vd] along a draft, from the slow loop over a fresh context."""
    context, row = fresh_context(drafter, TEXT)
    forced = torch.tensor([target_ids + [0] * (drafter.config.num_draft_tokens - len(target_ids))])
    return context.draft([row], forced).logits[0, : len(target_ids)]


def test_the_vector_a_proposal_is_drawn_from_is_the_one_handed_to_the_verifier():
    drafter = stored_drafter("deepspec_vanilla")
    draft = draft_one(drafter, sampling=SAMPLED, length=7)
    assert draft.probs.dtype == torch.float32 and draft.probs.shape == (7, VOCAB)
    noise = KeyedNoise(SEED)
    for k, (token_id, q) in enumerate(zip(draft.token_ids, draft.probs, strict=True)):
        uniform = noise.uniform(NoisePurpose.PROPOSAL, anchor_position=len(TEXT) - 1, position=len(TEXT) + k)
        assert sample_from(q, uniform) == token_id
        assert q[token_id] > 0


def test_the_vectors_are_the_drafters_corrected_distribution_under_the_requests_sampling():
    drafter = stored_drafter("deepspec_gated")
    draft = draft_one(drafter, sampling=SAMPLED, length=7)
    expected, _ = target_probs(corrected_logits(drafter, draft.token_ids), [SAMPLED] * 7)
    torch.testing.assert_close(draft.probs, expected, atol=1e-5, rtol=0)
    assert (draft.probs == 0).any(), "top_p cuts nothing here"


def test_a_coupled_request_races_under_the_targets_noise():
    drafter = stored_drafter("speculators_anchor")
    draft = draft_one(drafter, sampling=SAMPLED, is_coupled=True)
    probs, _ = target_probs(corrected_logits(drafter, draft.token_ids), [SAMPLED] * 4)
    noise = KeyedNoise(SEED)
    assert draft.probs is None
    assert draft.token_ids == [race(q, noise.exponential(len(TEXT) + k, VOCAB)) for k, q in enumerate(probs)]


@pytest.mark.parametrize("length", [1, 3, 6])
def test_fewer_proposals_than_the_block_are_the_first_of_the_block(length):
    """I6."""
    drafter = stored_drafter("speculators_fill_in")
    assert draft_one(drafter, length=length).token_ids == draft_one(drafter, length=7).token_ids[:length]


def test_requests_of_every_kind_drafted_together_draft_as_each_alone():
    """B13, with lengths 1 to 4 and contexts of 4 and 10 positions."""
    drafter = make_drafter(markov_head_type="rnn")
    proposer, pages = proposer_with(drafter, {"a": TEXT, "b": OTHER})
    contexts = [
        context_of(TEXT, pages["a"], length=2, request_id="a"),
        context_of(OTHER, pages["b"], length=4, sampling=SAMPLED, request_id="b"),
        context_of(OTHER, pages["b"], length=1, request_id="c"),
        context_of(TEXT, pages["a"], length=3, sampling=SAMPLED, is_coupled=True, request_id="d"),
    ]
    together = proposer.propose(contexts)
    assert [len(draft.token_ids) for draft in together] == [2, 4, 1, 3]
    for context, draft in zip(contexts, together, strict=True):
        assert proposer.propose([context])[0].token_ids == draft.token_ids


def test_without_a_sequential_head_a_sampled_request_gets_the_argmax_as_a_certain_draft():
    """B8: slots drawn independently make incoherent blocks."""
    drafter = stored_drafter("deepspec_dflash")
    draft = draft_one(drafter, sampling=SAMPLED, length=7)
    assert draft.probs is None
    assert draft.token_ids == fresh_greedy_draft(drafter, TEXT, 7)


def test_without_a_sequential_head_a_coupled_request_still_races():
    drafter = stored_drafter("deepspec_dflash")
    draft = draft_one(drafter, sampling=SAMPLED, is_coupled=True)
    probs, _ = target_probs(corrected_logits(drafter, draft.token_ids), [SAMPLED] * 4)
    noise = KeyedNoise(SEED)
    assert draft.token_ids == [race(q, noise.exponential(len(TEXT) + k, VOCAB)) for k, q in enumerate(probs)]


class TestPrunedVocabulary:
    """Draft id i stands for target id 2i (B15, I4)."""

    drafter = make_drafter(draft_vocab_size=128)
    ids = np.arange(0, 256, 2)

    def test_greedy_proposals_are_mapped_once(self):
        draft = draft_one(self.drafter)
        assert draft.token_ids == fresh_greedy_draft(self.drafter, TEXT, 4)
        assert max(draft.token_ids) > 127, "draft ids would do"

    def test_vectors_span_the_targets_vocabulary_and_are_zero_outside_the_kept_ids(self):
        draft = draft_one(self.drafter, sampling=SAMPLED)
        assert draft.probs.shape == (4, 256)
        assert not draft.probs[:, 1::2].any()
        assert (draft.probs[range(4), draft.token_ids] > 0).all()
        expected, _ = target_probs(corrected_logits(self.drafter, draft.token_ids), [SAMPLED] * 4)
        torch.testing.assert_close(draft.probs[:, ::2], expected, atol=1e-5, rtol=0)

    def test_a_race_uses_the_noise_of_the_target_ids(self):
        draft = draft_one(self.drafter, sampling=SAMPLED, is_coupled=True)
        probs, _ = target_probs(corrected_logits(self.drafter, draft.token_ids), [SAMPLED] * 4)
        noise = KeyedNoise(SEED)
        expected = [2 * race(q, noise.exponential(len(TEXT) + k, 256)[self.ids]) for k, q in enumerate(probs)]
        assert draft.token_ids == expected


def test_a_context_that_is_not_a_number_costs_that_request_its_drafts_only(caplog):
    drafter = stored_drafter("deepspec_vanilla")
    proposer, pages = proposer_with(drafter, {"a": TEXT, "b": OTHER})
    healthy = proposer.propose([context_of(OTHER, pages["b"], request_id="b")])[0]
    taps = torch.full((1, drafter.config.feature_size), float("nan"))
    proposer.take_features(committed(taps, torch.tensor([3]), torch.tensor([3])))
    contexts = [context_of(TEXT, pages["a"], request_id="a"), context_of(OTHER, pages["b"], request_id="b")]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            drafts = proposer.propose(contexts)
            assert drafts[0] is NO_DRAFT
            assert drafts[1].token_ids == healthy.token_ids
    assert caplog.text.count("request a goes on without drafts") == 1


def test_a_released_request_may_draft_again():
    drafter = stored_drafter("deepspec_vanilla")
    proposer, pages = proposer_with(drafter, {"a": TEXT})
    context, taps = context_of(TEXT, pages["a"]), target_taps(TEXT[:-1], drafter.config.tap_ids)
    proposer.take_features(committed(taps * float("nan"), torch.arange(10), torch.arange(10)))
    assert proposer.propose([context]) == [NO_DRAFT]
    proposer.release("a")
    proposer.take_features(committed(taps, torch.arange(10), torch.arange(10)))
    assert proposer.propose([context])[0].token_ids == fresh_greedy_draft(drafter, TEXT, 4)


def test_what_an_earlier_owner_left_in_a_new_page_is_cleared():
    """The last page of 10 positions has two slots that nobody writes, and attention reads them masked."""
    drafter = stored_drafter("deepspec_vanilla")
    proposer, pages = proposer_with(drafter, {"a": TEXT})
    nan = torch.full((12, drafter.config.feature_size), float("nan"))
    proposer.take_features(committed(nan, torch.arange(12), torch.arange(12)))
    taps = target_taps(TEXT[:-1], drafter.config.tap_ids)
    proposer.take_features(committed(taps, torch.arange(10), torch.arange(10), new_page_ids=[0, 1, 2]))
    draft = proposer.propose([context_of(TEXT, pages["a"])])[0]
    assert draft.token_ids == fresh_greedy_draft(drafter, TEXT, 4)


def test_a_step_that_commits_nothing_is_fine():
    drafter = stored_drafter("deepspec_vanilla")
    proposer, pages = proposer_with(drafter, {"a": TEXT})
    nothing = torch.empty(0, dtype=torch.int64)
    proposer.take_features(committed(torch.empty(0, drafter.config.feature_size), nothing, nothing))
    draft = proposer.propose([context_of(TEXT, pages["a"])])[0]
    assert draft.token_ids == fresh_greedy_draft(drafter, TEXT, 4)


@pytest.mark.parametrize(("limit", "length"), [(20, 4), (13, 2), (11, 0), (5, 0)])
def test_a_text_near_the_drafters_limit_gets_shorter_drafts_then_none(limit, length):
    assert len(draft_one(make_drafter(max_position=limit)).token_ids) == length


# -- rounds in which not everybody drafts, and confidences -------------------------------------------------------

THREE = {"a": TEXT, "b": OTHER, "c": TEXT[:7]}
WITH_HEAD = ("deepspec_vanilla", "deepspec_gated", "deepspec_dflash", "speculators_anchor", "speculators_fill_in")


def contexts_of_three(pages, **fields) -> list[DraftContext]:
    return [context_of(text, pages[i], request_id=i, **fields) for i, text in THREE.items()]


@pytest.mark.parametrize("chosen", [[0, 1, 2], [1], [2, 0], []])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_chosen_request_gets_the_draft_it_would_have_got_among_all(head, chosen):
    proposer, pages = proposer_with(make_drafter(markov_head_type=head), THREE)
    contexts = contexts_of_three(pages, sampling=SAMPLED)
    everybodys = proposer.propose(contexts)
    drafts = proposer.begin(contexts).draft(chosen)
    assert [d.token_ids for d in drafts] == [everybodys[i].token_ids for i in chosen]
    for draft, i in zip(drafts, chosen, strict=True):
        torch.testing.assert_close(draft.probs, everybodys[i].probs, atol=1e-6, rtol=1e-5)


def test_the_vocabulary_and_the_sequential_head_are_computed_for_chosen_requests_only(monkeypatch):
    drafter = make_drafter()
    proposer, pages = proposer_with(drafter, THREE)
    num_rows = []
    original = Drafter.with_base_logits
    monkeypatch.setattr(
        Drafter,
        "with_base_logits",
        lambda self, hidden, **more: num_rows.append(hidden.shape[0]) or original(self, hidden, **more),
    )
    drafting = proposer.begin(contexts_of_three(pages))
    drafting.first_confidences()
    assert num_rows == []
    drafting.draft([2])
    assert num_rows == [1]


@pytest.mark.parametrize("name", WITH_HEAD)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_confidences_are_those_of_the_training_module_along_the_drawn_tokens(name, sampling):
    drafter, module = stored_drafter(name), load_module(FIXTURES / name)
    draft = draft_one(drafter, sampling=sampling, length=7)
    assert len(draft.confidences) == 7 and all(type(c) is float for c in draft.confidences)
    expected = draft_with_module(
        module,
        target_taps(TEXT[:-1], drafter.config.tap_ids),
        torch.arange(len(TEXT) - 1),
        torch.tensor(TEXT[-1:]),
        torch.tensor([len(TEXT) - 1]),
        forced=torch.tensor([draft.token_ids]),
    )
    assert draft.confidences == pytest.approx(expected.confidence_logits[0].sigmoid().tolist(), abs=1e-5)


@pytest.mark.parametrize("name", WITH_HEAD)
def test_the_first_confidences_of_a_round_are_known_before_anything_is_drawn(name):
    proposer, pages = proposer_with(stored_drafter(name), THREE)
    drafting = proposer.begin(contexts_of_three(pages))
    stated = drafting.first_confidences()
    drafts = drafting.draft([0, 1, 2])
    assert proposer.has_confidences
    assert stated == pytest.approx([draft.confidences[0] for draft in drafts], abs=1e-6)
    assert len(set(stated)) == 3


def test_a_shorter_part_of_a_draft_keeps_its_confidences():
    draft = draft_one(stored_drafter("deepspec_vanilla"), sampling=SAMPLED, length=5)
    assert draft.prefix(2).confidences == draft.confidences[:2]
    assert draft.prefix(2).probs.shape == (2, VOCAB)


def test_a_drafter_without_a_confidence_head_states_how_often_each_position_was_right():
    """One draft of four: two accepted, the third wrong; 0.5 counts as 20 tokens, the rates of all as 4 for this one."""
    proposer, pages = proposer_with(stored_drafter("deepspec_dflash_noconf"), {"a": TEXT, "b": OTHER})
    assert not proposer.has_confidences
    contexts = [context_of(TEXT, pages["a"]), context_of(OTHER, pages["b"], request_id="b")]
    drafts = proposer.propose(contexts)
    assert [draft.confidences for draft in drafts] == [[0.5] * 4] * 2
    proposer.take_verdict("a", drafts[0], 2)
    right, wrong = 11 / 21, 10 / 21
    drafts = proposer.propose(contexts)
    assert drafts[1].confidences == pytest.approx([right, right, wrong, 0.5])
    own = [(1 + 4 * right) / 5, (1 + 4 * right) / 5, 4 * wrong / 5, 0.5]
    assert drafts[0].confidences == pytest.approx(own)
    assert proposer.forecast(contexts)[0].paid == pytest.approx(np.cumprod(own).tolist())


def test_a_request_that_gets_no_draft_has_confidence_zero():
    """One past the drafter's limit, one whose context is not a number."""
    drafter = make_drafter(max_position=10)
    proposer, pages = proposer_with(drafter, {"a": TEXT, "b": OTHER, "c": OTHER})
    nan = torch.full((1, drafter.config.feature_size), float("nan"))
    proposer.take_features(committed(nan, torch.tensor([1]), torch.tensor([129])))
    contexts = [context_of(t, pages[i], request_id=i) for i, t in zip("abc", (TEXT, OTHER, OTHER), strict=True)]
    drafting = proposer.begin(contexts)
    confidences = drafting.first_confidences()
    assert (confidences[0], confidences[2]) == (0.0, 0.0)
    assert confidences[1] > 0
    assert [len(draft.token_ids) for draft in drafting.draft([0, 1, 2])] == [0, 4, 0]


# -- who joins the pass, and what is forecast ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepspec_vanilla", "deepspec_dflash_noconf"])
def test_only_requests_that_join_are_drafted_for(name, monkeypatch):
    proposer, pages = proposer_with(stored_drafter(name), THREE)
    contexts = contexts_of_three(pages, sampling=SAMPLED)
    everybodys = proposer.propose(contexts)
    num_rows = []
    original = Drafter.run_blocks
    monkeypatch.setattr(
        Drafter, "run_blocks", lambda self, rows, cache: num_rows.append(len(rows)) or original(self, rows, cache)
    )
    drafts = proposer.propose([replace(c, joins_pass=c.request_id == "b") for c in contexts])
    assert num_rows == [1]
    assert drafts[0] is NO_DRAFT and drafts[2] is NO_DRAFT
    assert drafts[1].token_ids == everybodys[1].token_ids


def test_where_nobody_joins_no_tensor_is_touched(monkeypatch):
    """Case J6."""
    proposer, pages = proposer_with(stored_drafter("deepspec_vanilla"), THREE)
    contexts = [replace(context, joins_pass=False) for context in contexts_of_three(pages)]
    monkeypatch.setattr("dspark.speculation.dspark_drafter.torch", None)
    monkeypatch.setattr(proposer, "_drafter", SimpleNamespace(config=proposer._drafter.config))
    forecasts = proposer.forecast(contexts)
    assert [forecast.paid for forecast in forecasts] == [pytest.approx([0.5, 0.25, 0.125, 0.0625])] * 3
    drafting = proposer.begin(contexts)
    assert drafting.first_confidences() == [0.0] * 3
    assert drafting.draft([0, 1, 2]) == proposer.propose(contexts) == [NO_DRAFT] * 3


def test_a_request_that_gets_no_draft_has_no_forecast():
    proposer, pages = proposer_with(make_drafter(max_position=13), {"a": TEXT, "b": OTHER})
    contexts = [context_of(TEXT, pages["a"]), context_of(OTHER, pages["b"], request_id="b")]
    assert [len(forecast.paid) for forecast in proposer.forecast(contexts)] == [2, 4]
    proposer.switch_off("b")
    assert [len(forecast.paid) for forecast in proposer.forecast(contexts)] == [2, 0]


def test_a_draft_of_which_nothing_was_verified_counts_as_it_was_stated():
    """Never before the text went on: until then the same tokens could be drawn again."""
    proposer, pages = proposer_with(stored_drafter("deepspec_vanilla"), {"a": TEXT})
    before = proposer.forecast([context_of(TEXT, pages["a"])])
    (draft,) = proposer.propose([context_of(TEXT, pages["a"])])
    assert proposer.rates.num_requests == 1
    assert proposer.forecast([context_of(TEXT, pages["a"])]) == before, "dropped"
    proposer.propose([context_of(TEXT, pages["a"])])
    (after,) = proposer.forecast([context_of([*TEXT, 5], pages["a"])])
    stated = survivals_of(draft.confidences)
    first = (stated[0] + 20 * 0.5) / 21
    assert after.paid[0] == pytest.approx((stated[0] + 4 * first) / 5)
    second = (stated[1] + 20 * 0.5) / (stated[0] + 20)
    assert after.paid[1] / after.paid[0] == pytest.approx((stated[1] + 4 * second) / (stated[0] + 4))


def test_a_round_that_went_to_another_proposer_counts_by_its_first_confidence():
    proposer, pages = proposer_with(stored_drafter("deepspec_vanilla"), {"a": TEXT})
    (stated,) = proposer.begin([context_of(TEXT, pages["a"])]).first_confidences()
    (after,) = proposer.forecast([context_of([*TEXT, 5], pages["a"], length=2)])
    first = (stated + 4 * (stated + 10) / 21) / 5
    assert after.paid == pytest.approx([first, first * 0.5])


def test_a_request_id_that_comes_again_starts_from_what_all_requests_taught():
    """Case J9."""
    proposer, pages = proposer_with(stored_drafter("deepspec_vanilla"), {"a": TEXT})
    context = context_of(TEXT, pages["a"])
    for _ in range(30):
        (draft,) = proposer.propose([context])
        proposer.take_verdict("a", draft, 0)
    proposer.propose([context])  # stated, not judged
    assert proposer.forecast([context])[0].paid[0] < 0.1
    proposer.release("a")
    assert proposer.num_requests == 0
    again, other = (replace(context, token_ids=[*TEXT, 1], request_id=i) for i in "ab")
    assert proposer.forecast([again]) == proposer.forecast([other])
    assert 0.1 < proposer.forecast([again])[0].paid[0] < 0.5


def test_what_was_learned_of_all_requests_survives_a_restart(caplog):
    drafter = stored_drafter("deepspec_vanilla")
    taught, pages = proposer_with(drafter, {"a": TEXT})
    (draft,) = taught.propose([context_of(TEXT, pages["a"])])
    taught.take_verdict("a", draft, 3)
    state = json.loads(json.dumps(taught.export_state()))
    restarted, _ = proposer_with(drafter, {"a": TEXT})
    restarted.restore_state(state)
    taught.release("a")
    assert restarted.forecast([context_of(TEXT, pages["a"])]) == taught.forecast([context_of(TEXT, pages["a"])])
    assert caplog.text == ""
    restarted.restore_state({"positions": [[2.0, 1.0]], "speed": 1})
    assert "'positions' of the dspark drafter are ignored" in caplog.text
    assert "'speed' of the dspark drafter are ignored" in caplog.text
    assert restarted.forecast([context_of(TEXT, pages["a"])]) == taught.forecast([context_of(TEXT, pages["a"])])
