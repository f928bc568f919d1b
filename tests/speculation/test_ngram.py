"""The n-gram proposer against a naive rescan, and its per-request memory."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from dspark.request import SamplingParams
from dspark.speculation.match_rates import MATCH_PRIORS, MatchKind
from dspark.speculation.ngram import NgramProposer
from dspark.speculation.prefix_scheduler import survivals_of
from dspark.speculation.proposal import DraftContext, Forecast

PAIR = [8, 9, 4, 8, 9]  # two tokens repeat; then comes 4
PERIODIC = [1, 2, 3] * 9


def context(token_ids, *, num_draft_tokens=5, request_id="a") -> DraftContext:
    return DraftContext(
        request_id=request_id,
        token_ids=token_ids,
        sampling=SamplingParams(),
        seed=0,
        is_coupled=False,
        num_draft_tokens=num_draft_tokens,
        page_ids=(),
        page_serials=(),
    )


def propose(proposer: NgramProposer, token_ids, **fields) -> list[int]:
    draft = proposer.propose([context(token_ids, **fields)])[0]
    assert draft.probs is None
    return draft.token_ids


def naive(token_ids: list[int], num_draft_tokens: int, *, max_ngram: int, min_ngram: int) -> list[int]:
    """Rescan everything: longest suffix first, latest earlier occurrence, continuation through the text's end."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[len(token_ids) - n :]:
                text = list(token_ids)
                while len(text) < len(token_ids) + num_draft_tokens:
                    text.append(text[start + n + len(text) - len(token_ids)])
                return text[len(token_ids) :]
    return []


def test_the_continuation_of_the_last_occurrence_is_copied():
    assert propose(NgramProposer(), [1, 2, 7, 8, 9, 1, 2, 3, 4, 5, 6, 1, 2], num_draft_tokens=4) == [3, 4, 5, 6]


def test_a_longer_match_beats_a_later_one():
    text = [5, 1, 2, 3, 9, 1, 2, 3, 4, 8, 5, 1, 2, 3]
    assert propose(NgramProposer(max_ngram=4, min_ngram=2), text, num_draft_tokens=1) == [9]
    assert propose(NgramProposer(max_ngram=3, min_ngram=2), text, num_draft_tokens=1) == [4]


def test_periodic_text_is_drafted_to_full_length():
    assert propose(NgramProposer(), [4, 5, 6, 4, 5, 6], num_draft_tokens=8) == [4, 5, 6, 4, 5, 6, 4, 5]
    assert propose(NgramProposer(), [7, 7, 7], num_draft_tokens=5) == [7, 7, 7, 7, 7]


def test_text_without_repetition_gets_no_draft():
    assert propose(NgramProposer(), [1, 2, 3, 4, 5, 6]) == []
    assert propose(NgramProposer(min_ngram=2), [1, 9, 1]) == []  # one token of match is not enough


@pytest.mark.parametrize("token_ids", [[3], [3, 3], [3, 4], [3, 3, 3]])
def test_a_text_shorter_than_the_history_is_fine(token_ids):
    """Case K5."""
    expected = [3] * 5 if token_ids == [3, 3, 3] else []
    assert propose(NgramProposer(max_ngram=4, min_ngram=2), token_ids) == expected


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(4, 2), (3, 1), (2, 2), (6, 4)])
@pytest.mark.parametrize("vocab_size", [2, 4, 12])
def test_growing_text_gives_the_drafts_of_a_naive_rescan(vocab_size, max_ngram, min_ngram):
    """Random, periodic and mixed texts, grown by ragged rounds as the engine does."""
    generator = np.random.default_rng(vocab_size * 100 + max_ngram)
    proposer = NgramProposer(max_ngram=max_ngram, min_ngram=min_ngram)
    num_drafts = 0
    for text_id in range(6):
        period = generator.integers(vocab_size, size=int(generator.integers(1, 9))).tolist()
        noise = generator.integers(vocab_size, size=200).tolist()
        is_noise = generator.random(200) < (0.0, 0.05, 1.0)[text_id % 3]
        whole = [noise[i] if is_noise[i] else period[i % len(period)] for i in range(200)]
        token_ids = whole[: int(generator.integers(1, 20))]
        while len(token_ids) < len(whole):
            num_draft_tokens = int(generator.integers(1, 8))
            drafted = propose(proposer, token_ids, num_draft_tokens=num_draft_tokens, request_id=str(text_id))
            assert drafted == naive(token_ids, num_draft_tokens, max_ngram=max_ngram, min_ngram=min_ngram)
            num_drafts += bool(drafted)
            token_ids.extend(whole[len(token_ids) : len(token_ids) + int(generator.integers(1, 7))])
    assert num_drafts > 100


def test_requests_do_not_see_each_others_text():
    proposer = NgramProposer()
    repeated, unlike = [1, 2, 3, 1, 2], [1, 2]
    drafts = proposer.propose(
        [context(unlike, request_id="a"), context(repeated, request_id="b"), context([9, 1, 2], request_id="c")]
    )
    assert [draft.token_ids for draft in drafts] == [[], [3, 1, 2, 3, 1], []]


@pytest.mark.parametrize("second", [[9, 8, 5, 9, 8], [1, 2, 4, 1, 2], [1, 2, 3, 1, 2, 4, 4, 1, 2]])
def test_another_text_under_a_known_id_starts_afresh(second):
    proposer = NgramProposer()
    propose(proposer, [1, 2, 3, 1, 2, 5])
    assert propose(proposer, second) == naive(second, 5, max_ngram=4, min_ngram=2) != []


def test_another_text_that_ends_alike_starts_afresh():
    proposer = NgramProposer()
    propose(proposer, [1, 2, 3, 20, 21, 22, 23])
    assert propose(proposer, [1, 2, 9, 20, 21, 22, 23, 1, 2], num_draft_tokens=2) == [9, 20]


def test_a_list_that_was_rewritten_in_place_starts_afresh():
    proposer, token_ids = NgramProposer(), [1, 2, 3, 1, 2]
    assert propose(proposer, token_ids, num_draft_tokens=1) == [3]
    token_ids[:] = [1, 2, 6, 6, 1, 2]
    assert propose(proposer, token_ids, num_draft_tokens=1) == [6]


def test_a_released_request_leaves_nothing_behind():
    proposer = NgramProposer()
    propose(proposer, [1, 2, 3, 1, 2])
    proposer.release("a")
    proposer.release("a")
    proposer.release("never seen")
    assert proposer.num_requests == 0
    assert propose(proposer, [1, 2]) == []


def test_a_draft_is_repeated_when_nothing_was_committed():
    proposer, token_ids = NgramProposer(), [1, 2, 3, 4, 1, 2]
    assert propose(proposer, token_ids) == propose(proposer, token_ids) == [3, 4, 1, 2, 3]


def find(token_ids, **fields):
    return NgramProposer(max_ngram=4, min_ngram=2).find_match(context(token_ids, **fields))


@pytest.mark.parametrize(
    ("text", "num_matched", "period", "is_contested"),
    [
        ([1, 2, 7, 1, 2], 2, 3, False),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], 5, 6, False),
        ([*range(20), 77, *range(20)], 16, 21, False),
        ([5, 1, 2, 3, 9, 1, 2, 3, 4, 8, 5, 1, 2, 3], 4, 10, True),
        ([1, 2, 3, 1, 2, 3, 1], 4, 3, False),
        ([7, 7, 7], 2, 1, False),  # the whole text before the match is matched
    ],
)
def test_a_match_says_how_far_back_it_reaches_and_whether_shorter_suffixes_disagree(
    text, num_matched, period, is_contested
):
    match = find(text)
    assert (match.num_matched, match.period, match.is_contested) == (num_matched, period, is_contested)


@pytest.mark.parametrize(
    ("text", "is_periodic"),
    [
        ([1, 2, 3, 1, 2, 3], False),  # three tokens
        ([1, 2, 3, 1, 2, 3, 1], True),
        ([4] * 5, True),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5], False),  # 5 of a period of 6
        ([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5, 9], True),
    ],
)
def test_a_text_is_periodic_once_a_whole_period_and_four_tokens_were_repeated(text, is_periodic):
    assert find(text).is_periodic == is_periodic


def test_a_text_without_repetition_has_no_match():
    assert find([1, 2, 3]) is None


def test_a_matchs_draft_is_what_is_proposed():
    text = [5, 1, 2, 3, 9, 1, 2, 3, 4, 8, 5, 1, 2, 3]
    assert find(text).token_ids == propose(NgramProposer(), text)


# -- kinds of matches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (PAIR, (2, "plain")),
        ([5, 1, 2, 6, 5, 1, 2], (3, "plain")),
        ([5, 1, 2, 6, 1, 2, 7, 5, 1, 2], (3, "contested")),
        ([5, 1, 2, 6, 1, 2, 6, 5, 1, 2], (3, "plain")),  # the later occurrence goes on alike
        ([1, 1, 1], (2, "plain")),
        ([1, 1, 1, 1, 1], (4, "periodic")),
        (PERIODIC[:8], (4, "periodic")),
        (PERIODIC, (16, "periodic")),
        ([*range(30, 39), 1, 2, 4, *range(30, 39)], (8, "plain")),
        ([*range(30, 50), 1, 2, 4, *range(30, 50)], (16, "plain")),
    ],
)
def test_a_repetition_is_classed_by_its_length_and_evidence(text, kind):
    assert find(text).kind == MatchKind(*kind)


@pytest.mark.parametrize("text", [[3, 3], [5, 1, 6, 1, 7, 5, 1]])
def test_repetitions_that_no_kind_describes_count_as_the_weakest(text):
    """One token, and two that are contested: with a minimum of one token."""
    match = NgramProposer(max_ngram=3, min_ngram=1).find_match(context(text))
    assert match.kind == MatchKind(2, "plain")


def test_every_kind_of_match_has_a_prior_that_rises_with_its_length():
    text_kinds = {
        MatchKind(n, evidence) for n in (2, 3, 4, 8, 16) for evidence in ("plain", "contested", "periodic")
    } - {MatchKind(2, "contested"), MatchKind(2, "periodic"), MatchKind(3, "periodic")}
    assert set(MATCH_PRIORS) == text_kinds
    plain = [MATCH_PRIORS[MatchKind(n, "plain")].expected_accepted(5) for n in (2, 3, 4, 8, 16)]
    assert plain == sorted(plain)


# -- confidences ---------------------------------------------------------------------------------------------------


def confidences(proposer: NgramProposer, token_ids, **fields) -> list[float] | None:
    return proposer.propose([context(token_ids, **fields)])[0].confidences


def test_a_draft_states_the_rates_of_its_kind():
    assert confidences(NgramProposer(), PAIR) == pytest.approx([0.46, 0.62, 0.62, 0.62, 0.62])
    assert confidences(NgramProposer(), PERIODIC, num_draft_tokens=2) == pytest.approx([0.995, 0.997])
    assert confidences(NgramProposer(), PAIR, num_draft_tokens=1) == pytest.approx([0.46])
    assert confidences(NgramProposer(), [1, 2, 3]) is None


def test_the_forecast_is_the_survival_of_the_draft_that_is_proposed():
    proposer = NgramProposer()
    contexts = [context(PAIR), context([1, 2, 3], request_id="b"), context(PERIODIC, request_id="c")]
    forecasts = proposer.forecast(contexts)
    drafts = proposer.propose(contexts)
    assert [forecast.free for forecast in forecasts] == [survivals_of(draft.confidences or ()) for draft in drafts]
    assert forecasts[0].free == pytest.approx([0.46, 0.46 * 0.62, 0.46 * 0.62**2, 0.46 * 0.62**3, 0.46 * 0.62**4])
    assert forecasts[1] == Forecast(free=[], paid=())
    assert not NgramProposer.has_pass and all(not forecast.paid for forecast in forecasts)


def test_who_joins_a_pass_does_not_matter_to_it():
    (joining,) = NgramProposer().propose([context(PAIR)])
    (declined,) = NgramProposer().propose([replace(context(PAIR), joins_pass=False)])
    assert joining == declined


def test_what_was_foretold_is_judged_by_the_committed_tokens_up_to_the_first_wrong_one():
    """4 8 9 4 8 was foretold, 4 8 77 came: the first right, of two later ones one."""
    proposer = NgramProposer()
    confidences(proposer, PAIR)
    confidences(proposer, [*PAIR, 4, 8, 77, 4])
    first, later = (1 + 20 * 0.46) / 21, (1 + 20 * 0.62) / 22
    assert confidences(proposer, PAIR, request_id="new") == pytest.approx([first, *[later] * 4])
    proposer.release("a")
    assert confidences(proposer, PAIR) == pytest.approx([first, *[later] * 4])


def test_a_requests_own_text_weighs_more_than_that_of_others():
    proposer = NgramProposer()
    confidences(proposer, PAIR)
    confidences(proposer, [*PAIR, 4, 8, 77, 4])
    first, later = (1 + 20 * 0.46) / 21, (1 + 20 * 0.62) / 22
    again = [*PAIR, 4, 8, 77, 4, 31, 32, 33, 8, 77]  # a pair of its own again
    own = [(1 + 4 * first) / 5, *[(1 + 4 * later) / 6] * 4]
    assert find(again).kind == MatchKind(2, "plain")
    assert confidences(proposer, again) == pytest.approx(own)


def test_tokens_not_yet_committed_are_not_judged():
    """The same text twice: drafts were dropped. Then one token comes."""
    proposer = NgramProposer()
    for _ in range(2):
        assert confidences(proposer, PAIR) == pytest.approx([0.46, *[0.62] * 4])
    confidences(proposer, [*PAIR, 4])
    assert confidences(proposer, PAIR, request_id="new") == pytest.approx([(1 + 20 * 0.46) / 21, *[0.62] * 4])


def test_promises_of_one_round_do_not_depend_on_the_order_of_requests():
    drafts = []
    for order in ("abc", "cba"):
        proposer = NgramProposer()
        proposer.propose([context(PAIR, request_id=i) for i in order])
        grown = {"a": [*PAIR, 77, *PAIR], "b": [*PAIR, 4, 8, 9, 4, 8], "c": [*PAIR, 4, 66, 1, *PAIR]}
        drafted = proposer.propose([context(grown[i], request_id=i) for i in order])
        by_id = dict(zip(order, drafted, strict=True))
        drafts.append([by_id[i].confidences for i in "abc"])
    for first, second in zip(*drafts, strict=True):
        assert first == pytest.approx(second, rel=1e-2)


def test_a_request_id_that_comes_again_starts_from_what_all_requests_taught():
    """Case J9."""
    proposer = NgramProposer()
    for _ in range(20):
        confidences(proposer, PAIR)
        confidences(proposer, [*PAIR, 77])
        proposer.propose([context(PAIR)])  # shorter again: the same request, another text
    assert confidences(proposer, PAIR)[0] < 0.15
    proposer.release("a")
    assert proposer.num_requests == 0
    expected = confidences(proposer, PAIR, request_id="new")
    assert confidences(proposer, PAIR) == expected
    assert expected[0] > 0.2


def test_rates_survive_a_restart_but_not_those_of_single_requests():
    proposer, restarted = NgramProposer(), NgramProposer()
    confidences(proposer, PAIR)
    confidences(proposer, [*PAIR, 4, 8, 77, 4])
    restarted.restore_state(json.loads(json.dumps(proposer.export_state())))
    assert confidences(restarted, PAIR, request_id="new") == confidences(proposer, PAIR, request_id="new")
    assert confidences(restarted, PAIR) == confidences(restarted, PAIR, request_id="new")


@pytest.mark.parametrize(
    "state",
    [
        {"matches": {"2 plain": {"first": [1, 2]}}},
        {"matches": {"2 plain": {"first": [1, 2], "later": [1, float("nan")]}}},
        {"matches": {"2 plain": {"first": [1, 2], "later": [1, -1]}}},
        {"matches": {"2 plain": {"first": [1, 1e300], "later": [0, 0]}}},
        {"matches": {"2 plain": {"first": [True, 2], "later": [0, 0]}}},
        {"matches": {"9 odd": {"first": [1, 2], "later": [1, 1]}, "2 plain": {"first": [9, 9], "later": [9, 9]}}},
        {"matches": [1]},
        {"others": {}},
        None,
    ],
)
def test_a_state_of_another_shape_is_ignored_with_a_warning(state, caplog):
    proposer = NgramProposer()
    proposer.restore_state(state)
    assert "of the ngram drafter are ignored" in caplog.text
    assert confidences(proposer, PAIR) == pytest.approx([0.46, *[0.62] * 4])
