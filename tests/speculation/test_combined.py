"""The choice between a drafter and n-gram: made on what is known before the draw, learned from what was accepted."""

from __future__ import annotations

import json

import pytest
from stated_proposer import StatedProposer
from toys import FunctionProposer

from dspark.request import SamplingParams
from dspark.speculation.combined import CombinedProposer
from dspark.speculation.ngram import NgramProposer
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import NO_DRAFT, CommittedFeatures, Draft, DraftContext, Forecast

NEW = [1, 2, 3, 4, 5, 6]  # nothing repeats
PAIR = [8, 9, 4, 8, 9]  # two tokens repeat; then comes 4
PERIODIC = [1, 2, 3] * 9
DRAFTED = [70, 71, 72, 73, 74]


def context(token_ids, *, request_id="a", length=5, joins=True) -> DraftContext:
    return DraftContext(
        request_id=request_id, token_ids=list(token_ids), sampling=SamplingParams(), seed=0, is_coupled=False,
        num_draft_tokens=length, page_ids=(), page_serials=(), joins_pass=joins,
    )  # fmt: skip


def drafter_with(confidence) -> StatedProposer:
    stated = confidence if callable(confidence) else lambda _: confidence
    return StatedProposer(FunctionProposer(lambda c: DRAFTED), stated)


def proposer_names(proposer: CombinedProposer, *texts) -> list[str | None]:
    drafts = proposer.propose([context(text, request_id=str(i)) for i, text in enumerate(texts)])
    return [draft.proposer_name for draft in drafts]


# -- the choice ----------------------------------------------------------------------------------------------------


def test_a_text_that_repeats_nothing_gets_the_drafters_draft_however_unsure_it_is():
    proposer = CombinedProposer(drafter_with(0.0))
    (draft,) = proposer.propose([context(NEW)])
    assert (draft.token_ids, draft.proposer_name) == (DRAFTED, "stated")


@pytest.mark.parametrize(("confidence", "name"), [(0.9, "stated"), (0.6, "stated"), (0.5, "ngram"), (0.05, "ngram")])
def test_a_repeated_pair_competes_with_the_drafters_confidence(confidence, name):
    """A pair promises 0.46 * (1 + .62 + ..) = 1.10 tokens, the drafter c_1 * (1 + .5 + ..) = 1.94 c_1 at first."""
    assert proposer_names(CombinedProposer(drafter_with(confidence)), PAIR) == [name]


def test_ngram_drafts_are_those_of_the_ngram_proposer():
    proposer = CombinedProposer(drafter_with(0.0))
    (draft,) = proposer.propose([context(PAIR)])
    assert draft.token_ids == NgramProposer().propose([context(PAIR)])[0].token_ids == [4, 8, 9, 4, 8]
    assert draft.probs is None


def test_each_request_is_chosen_for_alone_and_drafts_keep_their_order():
    drafter = drafter_with(lambda c: 0.9 if c.request_id == "1" else 0.0)
    proposer = CombinedProposer(drafter)
    assert proposer_names(proposer, PAIR, PAIR, NEW, PERIODIC) == ["ngram", "stated", "stated", "ngram"]
    assert drafter.drafted == [["1", "2"]], "the sequential head runs for chosen requests alone"


def test_the_pass_is_saved_where_no_confidence_could_win():
    drafter = drafter_with(1.0)
    proposer = CombinedProposer(drafter)
    assert proposer_names(proposer, PERIODIC, PAIR) == ["ngram", "stated"]
    assert drafter.begun == [["1"]]
    assert proposer_names(proposer, PERIODIC) == ["ngram"]
    assert len(drafter.begun) == 1, "a round of periodic texts runs no pass at all"


def test_nothing_is_drawn_when_ngram_is_chosen_everywhere():
    drafter = drafter_with(0.1)
    assert proposer_names(CombinedProposer(drafter), PAIR, PAIR) == ["ngram", "ngram"]
    assert (drafter.begun, drafter.drafted) == ([["0", "1"]], [])


def test_the_draft_length_of_the_round_matters():
    """A pair's later tokens survive better than the drafter's at first: it wins with five tokens, not with one."""
    for length, name in ((5, "ngram"), (1, "stated")):
        (draft,) = CombinedProposer(drafter_with(0.5)).propose([context(PAIR, length=length)])
        assert draft.proposer_name == name
        assert len(draft.token_ids) <= 5


def test_where_the_drafter_draws_nothing_a_repetition_is_used():
    silent = StatedProposer(FunctionProposer(lambda c: []), lambda c: 0.9)
    assert proposer_names(CombinedProposer(silent), PAIR, NEW) == ["ngram", None]


def test_a_drafter_without_confidences_is_chosen_by_its_record_alone():
    drafter = FunctionProposer(lambda c: DRAFTED)
    proposer = CombinedProposer(drafter)
    assert proposer_names(proposer, PAIR, NEW) == ["ngram", "function"]
    teach(proposer, num_rounds=30, num_accepted=5)
    assert proposer_names(proposer, PAIR, NEW) == ["function", "function"]


# -- who joins the pass, and what is forecast ----------------------------------------------------------------------


def test_a_request_that_does_not_join_gets_the_repetition_or_nothing():
    """The drafter is sure of itself and would be chosen for all of them."""
    drafter = drafter_with(1.0)
    texts = {"0": NEW, "1": PAIR, "2": NEW, "3": PAIR}
    contexts = [context(text, request_id=i, joins=i in "03") for i, text in texts.items()]
    drafts = CombinedProposer(drafter).propose(contexts)
    assert [draft.proposer_name for draft in drafts] == ["stated", "ngram", None, "stated"]
    assert drafts[2] is NO_DRAFT
    assert (drafter.begun, drafter.drafted) == ([["0", "3"]], [["0", "3"]])


def test_no_pass_is_begun_where_nobody_joins():
    """Case J6."""
    drafter = drafter_with(1.0)
    contexts = [context(text, request_id=str(i), joins=False) for i, text in enumerate((NEW, PAIR, PERIODIC))]
    drafts = CombinedProposer(drafter).propose(contexts)
    assert [draft.proposer_name for draft in drafts] == [None, "ngram", "ngram"]
    assert (drafter.begun, drafter.drafted) == ([], [])


def test_it_has_a_pass_where_its_drafter_has_one():
    assert CombinedProposer(drafter_with(1.0)).has_pass
    assert not CombinedProposer(FunctionProposer(lambda c: [])).has_pass


def test_the_forecast_holds_the_repetitions_survivals_and_the_drafters_own():
    proposer = CombinedProposer(drafter_with(0.3))
    new, pair = proposer.forecast([context(NEW), context(PAIR, request_id="b", length=3)])
    assert new == Forecast(free=[], paid=[0.3])
    assert pair.paid == [0.3]
    assert pair.free == pytest.approx([0.46, 0.46 * 0.62, 0.46 * 0.62**2])


def test_the_forecast_of_a_repetition_is_what_its_draft_states():
    proposer = CombinedProposer(drafter_with(0.0))
    contexts = [context(PAIR, request_id="a"), context(PERIODIC, request_id="b")]
    forecasts = proposer.forecast(contexts)
    drafts = proposer.propose(contexts)
    assert [draft.proposer_name for draft in drafts] == ["ngram", "ngram"]
    assert [f.free for f in forecasts] == [survivals_of(draft.confidences) for draft in drafts]


def test_forecasts_and_stated_repetitions_do_not_depend_on_what_the_drafter_draws():
    """The same rounds with other drawn tokens: verified alike, everything known before the next draw is the same."""

    def known(drawn: list[int]) -> list:
        drafter = StatedProposer(FunctionProposer(lambda c: drawn), lambda c: 0.9)
        proposer, seen, text = CombinedProposer(drafter), [], list(PAIR)
        for token_id in (4, 5, 8, 9):
            contexts = [context(text, request_id="a"), context(PERIODIC, request_id="b"), context(NEW, request_id="c")]
            seen.append(proposer.forecast(contexts))
            drafts = proposer.propose(contexts)
            seen += [draft.confidences for draft in drafts if draft.proposer_name == "ngram"]
            seen.append(proposer.forecast(contexts))  # drawn now, not yet verified
            for i, draft in zip("abc", drafts, strict=True):
                proposer.take_verdict(i, draft, 1)
            text.append(token_id)
        return seen

    assert known([70, 71, 72, 73, 74]) == known([90, 91, 92, 93, 94])


def test_confidences_go_through_as_they_were_stated():
    """Also where the drafter's record says that its c_1 is far too high."""
    stated = Draft(token_ids=DRAFTED, confidences=[0.9, 0.8, 0.7, 0.6, 0.5])
    proposer = CombinedProposer(StatedProposer(FunctionProposer(lambda c: stated), lambda c: 0.9))
    teach(proposer, num_rounds=50, num_accepted=0)
    (draft,) = proposer.propose([context(NEW)])
    assert draft.confidences == [0.9, 0.8, 0.7, 0.6, 0.5]


# -- what is learned -----------------------------------------------------------------------------------------------


def teach(proposer: CombinedProposer, *, num_rounds: int, num_accepted: int, num_verified: int = 5) -> None:
    """Let drafts of the drafter for requests that end at once be verified."""
    for i in range(num_rounds):
        (draft,) = proposer.propose([context(NEW, request_id=f"t{i}")])
        proposer.take_verdict(f"t{i}", draft.prefix(num_verified), num_accepted)
        proposer.release(f"t{i}")


def test_a_drafter_that_is_right_more_often_than_it_says_is_believed_more():
    proposer = CombinedProposer(drafter_with(0.3))
    assert proposer_names(proposer, PAIR) == ["ngram"]
    teach(proposer, num_rounds=80, num_accepted=1, num_verified=1)
    assert proposer_names(proposer, PAIR) == ["stated"]


def test_a_drafter_that_is_wrong_more_often_than_it_says_is_believed_less():
    proposer = CombinedProposer(drafter_with(0.9))
    assert proposer_names(proposer, PAIR) == ["stated"]
    teach(proposer, num_rounds=60, num_accepted=0)
    assert proposer_names(proposer, PAIR) == ["ngram"]


def test_a_trimmed_draft_is_judged_up_to_where_it_was_verified():
    """Two of five were verified and both accepted: nothing is known of the other three."""
    proposer = CombinedProposer(drafter_with(0.5))
    before = proposer._drafter_rates.rates("new").later
    teach(proposer, num_rounds=10, num_accepted=2, num_verified=2)
    assert proposer._drafter_rates.rates("new").later > before
    counts = proposer._drafter_rates._all.later
    assert counts.num_accepted == counts.num_expected == pytest.approx(10, rel=0.02)


def test_the_ngram_side_learns_from_the_text_also_where_it_was_not_chosen():
    """The drafter is chosen after pairs, which go on as foretold every time and so win against it after a while."""
    proposer = CombinedProposer(drafter_with(0.9))
    for i in range(40):
        names = proposer_names(proposer, PAIR)
        assert i > 3 or names == ["stated"]
        proposer.propose([context([*PAIR, 4, 8, 9, 4, 8], request_id="0")])
        proposer.release("0")
    assert names == ["ngram"]


def test_a_dropped_draft_teaches_nothing():
    """Preempted between draft and verification: released, and drafted again."""
    proposer = CombinedProposer(drafter_with(0.9))
    before = proposer._drafter_rates.rates("a")
    for _ in range(5):
        proposer.propose([context(NEW)])
        proposer.release("a")
    assert proposer._drafter_rates.rates("a") == before


def test_verdicts_reach_the_drafter_for_its_own_drafts_only():
    drafter = drafter_with(lambda c: 0.9)
    proposer = CombinedProposer(drafter)
    drafts = proposer.propose([context(NEW, request_id="a"), context(PERIODIC, request_id="b")])
    for request_id, draft in zip("ab", drafts, strict=True):
        proposer.take_verdict(request_id, draft, 2)
    assert drafter.verdicts == [("a", 5, 2)]


def test_what_was_learned_of_all_requests_survives_a_restart():
    taught = CombinedProposer(drafter_with(0.9))
    teach(taught, num_rounds=60, num_accepted=0)
    taught.propose([context(PAIR)])
    taught.propose([context([*PAIR, 4, 8, 9])])
    restarted = CombinedProposer(drafter_with(0.9))
    restarted.restore_state(json.loads(json.dumps(taught.export_state())))
    taught.release("a")
    contexts = [context(NEW, request_id="n"), context(PAIR, request_id="m")]
    assert (
        restarted.forecast(contexts)
        == taught.forecast(contexts)
        != CombinedProposer(drafter_with(0.9)).forecast(contexts)
    )
    assert proposer_names(restarted, PAIR) == ["ngram"], "the drafter's record is known"


@pytest.mark.parametrize("state", [{"matches": {}}, {"choice": [1, 2]}, {"ngram": {"matches": 3}}, [], None, 7])
def test_a_state_of_another_shape_is_ignored_with_a_warning(state, caplog):
    proposer = CombinedProposer(drafter_with(0.9))
    proposer.restore_state(state)
    assert "are ignored" in caplog.text
    assert proposer.forecast([context(PAIR)]) == CombinedProposer(drafter_with(0.9)).forecast([context(PAIR)])


def test_released_requests_leave_nothing_behind():
    proposer = CombinedProposer(drafter_with(0.9))
    for text in (NEW, PAIR, PERIODIC):
        drafts = proposer.propose([context(text, request_id=str(i)) for i in range(3)])
        for i, draft in enumerate(drafts):
            proposer.take_verdict(str(i), draft, 1)
        proposer.propose([context([*text, 5, 5], request_id=str(i)) for i in range(3)])
        assert proposer.num_requests == 3
        for i in range(3):
            proposer.release(str(i))
        proposer.release("unknown")
        assert proposer.num_requests == 0


# -- what it hands on ----------------------------------------------------------------------------------------------


def test_it_passes_for_its_drafter_in_taps_and_lengths_and_hands_features_on():
    taken = []

    class Tapped(FunctionProposer):
        tapped_layers = (1, 3)
        max_draft_tokens = 4

        def take_features(self, committed):
            taken.append(committed)

    proposer = CombinedProposer(Tapped(lambda c: []))
    features = CommittedFeatures(features=None, positions=None, slot_mapping=None, new_page_ids=None)
    proposer.take_features(features)
    assert (proposer.name, proposer.tapped_layers, proposer.max_draft_tokens) == ("function+ngram", (1, 3), 4)
    assert taken == [features]


def test_no_draft_at_all_is_no_draft():
    proposer = CombinedProposer(FunctionProposer(lambda c: []))
    assert proposer.propose([context(NEW)]) == [NO_DRAFT]
    assert proposer.propose([]) == []


def test_the_part_that_is_verified_keeps_its_proposers_name():
    assert Draft(token_ids=[1, 2], proposer_name="ngram").prefix(1) == Draft(token_ids=[1], proposer_name="ngram")
