"""The promise for a drafter and n-gram together: the choice between them changes no text and no law."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from drafter_cases import DEEPSPEC, SPECULATORS
from dspark_bench import VOCAB as TINY_VOCAB
from dspark_bench import Recorded, assert_drafts_are_fresh, engine_over, stored_drafter
from stated_proposer import StatedProposer
from toys import (
    FunctionProposer,
    Transcript,
    drain,
    greedy_continuation,
    hashed_rule,
    make_engine,
    make_requests,
    random_prompts,
    right_until_proposer,
    run_requests,
    soft_proposer,
    step_once,
    table_rule,
)

from dspark.engine import engine as engine_module
from dspark.engine.engine import Engine
from dspark.request import FinishReason, SamplingParams
from dspark.speculation.combined import CombinedProposer
from dspark.speculation.dspark_drafter import DSparkProposer
from dspark.speculation.ngram import NgramMatch, NgramProposer
from dspark.speculation.proposal import Draft, DraftRound, Proposer

VOCAB = 16
SURPRISES = hashed_rule(VOCAB)


def stuttering_rule(context: tuple[int, ...]) -> np.ndarray:
    """Copies what stood three tokens before, with a surprise now and then: text that n-gram drafts fit mostly."""
    logits = SURPRISES(context)
    if len(context) > 3 and zlib.crc32(bytes(context)) % 7:
        logits[context[-3]] += 20.0
    return logits


def hashed_confidence(context) -> float:
    """Any confidence, from the committed text."""
    return zlib.crc32(np.asarray(context.token_ids, dtype=np.int64).tobytes()) % 1000 / 999


def combined_toy(rule=stuttering_rule, vocab_size=VOCAB) -> CombinedProposer:
    return CombinedProposer(StatedProposer(soft_proposer(rule, vocab_size), hashed_confidence))


def num_rounds(engine: Engine, proposer: str) -> float:
    labels = {"model_name": engine.model_name, "proposer": proposer}
    return engine.metrics.registry.get_sample_value("dspark:verification_rounds_per_proposer_total", labels) or 0.0


def counted(engine: Engine, name: str) -> float:
    return engine.metrics.registry.get_sample_value(name, {"model_name": engine.model_name})


PROMPTS = random_prompts(16, VOCAB, seed=4)


def serve_in_a_crowd(engine: Engine, requests) -> dict[str, Transcript]:
    """Two join at every step, and each third stranger among them leaves two steps later."""
    strangers = make_requests(random_prompts(9, VOCAB, seed=8), SamplingParams(max_tokens=30), prefix="stranger")
    transcripts = {r.request_id: Transcript() for r in (*requests, *strangers)}
    waiting = [r for r in itertools.chain(*itertools.zip_longest(requests, strangers)) if r is not None]
    leaving: list[str] = []
    while waiting:
        for request in waiting[:2]:
            engine.add_request(request)
            if request.request_id.startswith("stranger"):
                leaving.append(request.request_id)
        waiting = waiting[2:]
        step_once(engine, transcripts)
        if len(leaving) == 3:
            engine.abort(leaving.pop(0))
    drain(engine, transcripts)
    return transcripts


# -- texts ---------------------------------------------------------------------------------------------------------


def test_greedy_text_is_plain_decodings_for_every_length_while_both_draft():
    """A2, A5, H9, H15: joins, leaves, aborts, preemption, prefix hits; lengths 0 to 15."""
    expected = [greedy_continuation(stuttering_rule, prompt, 24) for prompt in PROMPTS]
    rounds = {"stated": 0.0, "ngram": 0.0}
    num_preemptions = 0.0
    for length in range(16):
        page_size = (1, 4, 16)[length % 3]
        proposer = CombinedProposer(
            StatedProposer(right_until_proposer(stuttering_rule, VOCAB, length % 4), hashed_confidence)
        )
        engine = make_engine(
            stuttering_rule, VOCAB, proposer=proposer, num_draft_tokens=length, page_size=page_size,
            num_pages=192 // page_size, max_batch_size=6, max_batch_tokens=48, max_model_len=80,
        )  # fmt: skip
        requests = make_requests(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
        transcripts = serve_in_a_crowd(engine, requests)
        assert [transcripts[r.request_id].token_ids for r in requests] == expected, length
        assert proposer.num_requests == 0
        assert counted(engine, "dspark:drafter_failures_total") == 0
        num_preemptions += counted(engine, "vllm:num_preemptions_total")
        for name in rounds:
            rounds[name] += num_rounds(engine, name)
    assert num_preemptions > 0
    assert min(rounds.values()) > 200, rounds


def test_seeded_text_is_that_of_seeded_plain_decoding_alone_and_in_a_crowd():
    """C1, C3, C4: greedy and sampled, fresh, after preemption and after prefix hits."""
    params = [
        SamplingParams(temperature=(0.0, 0.7, 1.0, 1.5)[i % 4], seed=50 + i, max_tokens=20, top_k=(0, 6)[i % 2])
        for i in range(len(PROMPTS))
    ]
    requests = make_requests(PROMPTS, params)
    plain = [run_requests(make_engine(stuttering_rule, VOCAB), [r])[r.request_id].token_ids for r in requests]
    for length in (1, 4, 11):
        engine = make_engine(
            stuttering_rule, VOCAB, proposer=combined_toy(), num_draft_tokens=length, num_pages=40, max_batch_size=6,
            max_model_len=80,
        )  # fmt: skip
        transcripts = serve_in_a_crowd(engine, requests)
        assert [transcripts[r.request_id].token_ids for r in requests] == plain, length
        for request, expected in zip(requests, plain, strict=True):  # the rates have moved, and prompts are cached
            for _ in range(2):
                assert run_requests(engine, [request])[request.request_id].token_ids == expected
        assert counted(engine, "vllm:num_preemptions_total") > 0
        assert counted(engine, "vllm:prefix_cache_hits_total") > 0
        assert min(num_rounds(engine, "stated"), num_rounds(engine, "ngram")) > 10


def test_a_request_may_draft_not_at_all_while_its_neighbours_do():
    params = [SamplingParams(temperature=0, max_tokens=24, num_draft_tokens=(0, None)[i % 2]) for i in range(6)]
    engine = make_engine(stuttering_rule, VOCAB, proposer=combined_toy())
    transcripts = run_requests(engine, make_requests(PROMPTS[:6], params))
    for i, prompt in enumerate(PROMPTS[:6]):
        assert transcripts[f"r{i}"].token_ids == greedy_continuation(stuttering_rule, prompt, 24)
        assert (transcripts[f"r{i}"].last.speculation.num_drafted > 0) == bool(i % 2)


class HalfJoining(CombinedProposer):
    """Lets a request join the drafting pass by a hash of its text."""

    def propose(self, contexts):
        return super().propose([replace(c, joins_pass=hashed_confidence(c) < 0.5) for c in contexts])


def test_texts_do_not_depend_on_who_joins_the_drafting_pass():
    params = [
        SamplingParams(temperature=(0.0, 1.0)[i % 2], seed=(None, 50 + i)[i % 2], max_tokens=24)
        for i in range(len(PROMPTS))
    ]
    requests = make_requests(PROMPTS, params)
    plain = [run_requests(make_engine(stuttering_rule, VOCAB), [r])[r.request_id].token_ids for r in requests]
    drafter = StatedProposer(soft_proposer(stuttering_rule, VOCAB), hashed_confidence)
    proposer = HalfJoining(drafter)
    engine = make_engine(stuttering_rule, VOCAB, proposer=proposer, num_pages=40, max_batch_size=6, max_model_len=80)
    transcripts = serve_in_a_crowd(engine, requests)
    assert [transcripts[r.request_id].token_ids for r in requests] == plain
    assert proposer.num_requests == 0
    assert counted(engine, "dspark:drafter_failures_total") == 0
    assert min(num_rounds(engine, "stated"), num_rounds(engine, "ngram")) > 10


# -- the law ---------------------------------------------------------------------------------------------------------

TABLE = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])
LAW = np.einsum("a,ab,bc,cd->abcd", TABLE[0], TABLE, TABLE, TABLE)  # of four tokens after a 0
NUM_REQUESTS = 4000
CHI_SQUARE_80 = 124.84  # 80 degrees of freedom, false alarm 0.001 for a fresh set of seeds
PROMPT = [0, 0, 1, 0, 1, 2, 0, 2, 1, 0]  # n-gram finds a continuation whatever follows


@pytest.fixture
def counted_seeds(monkeypatch):
    seeds = itertools.count()
    monkeypatch.setattr(engine_module, "request_seed", lambda _: next(seeds))


def chi_square(proposer: CombinedProposer, verification: str, num_requests: int = NUM_REQUESTS) -> tuple[float, Engine]:
    """Serve one prompt many times and compare the counts of all texts of four tokens with their law.

    The first token comes from the prefill, two of the others are drafted.
    """
    engine = make_engine(
        table_rule(TABLE), 3, proposer=proposer, num_draft_tokens=2, verification=verification, max_batch_size=48,
        num_pages=256, prefix_caching=False,
    )  # fmt: skip
    requests = make_requests([PROMPT] * num_requests, SamplingParams(temperature=1.0, max_tokens=4))
    counts = np.zeros((3, 3, 3, 3))
    for transcript in run_requests(engine, requests, max_steps=10**6).values():
        counts[tuple(transcript.token_ids)] += 1
    expected = num_requests * LAW
    return float(((counts - expected) ** 2 / expected).sum()), engine


def drafter_of_its_own(confidence) -> StatedProposer:
    return StatedProposer(soft_proposer(table_rule(TABLE), 3), confidence)


@pytest.mark.usefixtures("counted_seeds")
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_unseeded_texts_have_the_targets_law_whoever_drafts(verification):
    """Low or high confidence by request and position, so that both draft in many orders; rates move all the time."""

    def confidence(context) -> float:
        return (0.02, 0.95)[zlib.crc32(repr((context.seed, len(context.token_ids))).encode()) % 2]

    statistic, engine = chi_square(CombinedProposer(drafter_of_its_own(confidence)), verification)
    assert statistic < CHI_SQUARE_80
    assert min(num_rounds(engine, "stated"), num_rounds(engine, "ngram")) > NUM_REQUESTS / 5


@pytest.mark.usefixtures("counted_seeds")
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_the_test_notices_a_choice_that_looks_at_a_drawn_token(verification):
    """Keeping the drafter's draft only where it begins with 2 takes the others' chance away from what comes out."""

    class Peeking(CombinedProposer):
        def propose(self, contexts):
            drafted = self._drafter.propose(contexts)
            foretold = self._ngram.propose(contexts)
            return [d if not n.token_ids or d.token_ids[0] == 2 else n for d, n in zip(drafted, foretold, strict=True)]

    statistic, _ = chi_square(Peeking(drafter_of_its_own(lambda c: 0.5)), verification, num_requests=2000)
    assert statistic > 2 * CHI_SQUARE_80


# -- with a real drafter ---------------------------------------------------------------------------------------------

ALL = (*DEEPSPEC, *SPECULATORS)
GREEDY = SamplingParams(temperature=0, max_tokens=20)
TINY_PROMPTS = random_prompts(6, TINY_VOCAB, low=3, high=30, seed=3)


class ScriptedNgram(NgramProposer):
    """Finds a repetition in two of three rounds, whose continuation is right for some positions."""

    def __init__(self, plain_texts: Sequence[list[int]]) -> None:
        super().__init__()
        self._plain_texts = plain_texts

    def find_match(self, context) -> NgramMatch | None:
        text = list(context.token_ids)
        index = next(i for i, p in enumerate(TINY_PROMPTS) if text[: len(p)] == p)
        chance = zlib.crc32(repr(text).encode())
        right = self._plain_texts[index][len(text) - len(TINY_PROMPTS[index]) :][: chance % 5]
        if chance % 3 == 0:
            return None
        token_ids = [*right, *[1] * context.num_draft_tokens][: context.num_draft_tokens]
        return NgramMatch(token_ids=token_ids, num_matched=(2, 4, 16)[chance % 7 % 3], period=40, is_contested=False)


def combined_with_script(drafter: Proposer, plain_texts: Sequence[list[int]]) -> CombinedProposer:
    proposer = CombinedProposer(drafter)
    proposer._ngram = ScriptedNgram(plain_texts)
    return proposer


class RecordingRounds(DSparkProposer):
    """Records the drafts that were drawn, with what they were drawn for."""

    def __init__(self, drafter, *, num_pages=64) -> None:
        super().__init__(drafter, num_pages=num_pages, page_size=4)
        self.drafter = drafter
        self.recorded: list[Recorded] = []
        self.num_begun = 0

    def begin(self, contexts) -> DraftRound:
        self.num_begun += len(contexts)
        inner, recorded = super().begin(contexts), self.recorded

        class Round(DraftRound):
            def first_confidences(self):
                return inner.first_confidences()

            def draft(self, chosen) -> list[Draft]:
                drafts = inner.draft(chosen)
                for i, draft in zip(chosen, drafts, strict=True):
                    context = contexts[i]
                    recorded.append(Recorded(context=context, token_ids=list(context.token_ids), draft=draft))
                return drafts

        return Round()


@pytest.fixture(scope="module")
def plain_texts():
    requests = make_requests(TINY_PROMPTS, GREEDY)
    return [run_requests(engine_over(None), [r])[r.request_id].token_ids for r in requests]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_pages", [64, 24])
def test_drafts_between_ngram_drafts_are_those_of_a_fresh_run(name, num_pages, plain_texts):
    """H2, H6, H11: rounds, preemptions and joins in which n-gram drafted leave no hole in the drafter's context."""
    proposer = RecordingRounds(stored_drafter(name), num_pages=num_pages)
    engine = engine_over(combined_with_script(proposer, plain_texts), num_pages=num_pages)
    transcripts = run_requests(engine, make_requests(TINY_PROMPTS, GREEDY))
    assert [transcripts[f"r{i}"].token_ids for i in range(6)] == plain_texts
    assert counted(engine, "dspark:drafter_failures_total") == 0
    assert (counted(engine, "vllm:num_preemptions_total") > 0) == (num_pages == 24)
    assert num_rounds(engine, "ngram") > 0
    assert assert_drafts_are_fresh(proposer) >= 6


def test_drafts_after_a_prefix_hit_on_what_ngram_drafted_are_those_of_a_fresh_run(plain_texts):
    """H16."""
    proposer = RecordingRounds(stored_drafter("deepspec_vanilla"))
    combined = combined_with_script(proposer, plain_texts)
    engine = engine_over(combined)
    run_requests(engine, make_requests(TINY_PROMPTS[:1], GREEDY))
    assert num_rounds(engine, "ngram") > 0
    combined._ngram = NgramProposer()
    second_turn = [*TINY_PROMPTS[0], *plain_texts[0], 9, 8, 7]
    again = run_requests(engine, make_requests([second_turn], GREEDY, prefix="s"))["s0"]
    assert again.last.num_cached_tokens > len(TINY_PROMPTS[0])
    assert assert_drafts_are_fresh(proposer) >= 4


def test_sampled_requests_of_both_kinds_share_a_verification(plain_texts):
    proposer = RecordingRounds(stored_drafter("deepspec_vanilla"))
    engine = engine_over(combined_with_script(proposer, plain_texts), verification="block")
    transcripts = run_requests(engine, make_requests(TINY_PROMPTS, SamplingParams(temperature=1.0, max_tokens=20)))
    assert {t.finish_reason for t in transcripts.values()} == {FinishReason.LENGTH}
    assert counted(engine, "dspark:drafter_failures_total") == 0
    assert min(num_rounds(engine, "dspark"), num_rounds(engine, "ngram")) > 0
    assert proposer.num_begun > len(proposer.recorded), "c_1 never sent a request to n-gram"


def test_rounds_are_counted_under_the_name_of_the_one_who_drafted():
    engine = make_engine(stuttering_rule, VOCAB, proposer=combined_toy())
    run_requests(engine, make_requests(PROMPTS, SamplingParams(temperature=0, max_tokens=24)))
    for total, part in (
        ("vllm:spec_decode_num_drafts_total", "dspark:verification_rounds_per_proposer_total"),
        ("vllm:spec_decode_num_draft_tokens_total", "dspark:verified_tokens_per_proposer_total"),
        ("vllm:spec_decode_num_accepted_tokens_total", "dspark:accepted_tokens_per_proposer_total"),
    ):
        parts = [
            engine.metrics.registry.get_sample_value(part, {"model_name": "toy", "proposer": name})
            for name in ("stated", "ngram")
        ]
        assert min(parts) > 0
        assert sum(parts) == counted(engine, total)


def test_a_proposer_that_chooses_nothing_is_counted_under_its_own_name():
    engine = make_engine(stuttering_rule, VOCAB, proposer=FunctionProposer(lambda c: [0]))
    run_requests(engine, make_requests(PROMPTS[:1], GREEDY))
    assert num_rounds(engine, "function") == counted(engine, "vllm:spec_decode_num_drafts_total") > 0


def test_the_drafter_hears_what_of_its_drafts_was_verified_and_accepted():
    """A budget that trims drafts: only verified positions are told, and the sum is what the engine counts."""
    drafter = StatedProposer(soft_proposer(stuttering_rule, VOCAB), lambda c: 1.0)
    engine = make_engine(
        stuttering_rule, VOCAB, proposer=CombinedProposer(drafter), num_draft_tokens=7, max_batch_tokens=16,
        max_batch_size=6,
    )  # fmt: skip
    run_requests(engine, make_requests(PROMPTS, SamplingParams(temperature=0, max_tokens=24)))
    labels = {"model_name": "toy", "proposer": "stated"}
    value = engine.metrics.registry.get_sample_value
    assert sum(v for _, v, _ in drafter.verdicts) == value("dspark:verified_tokens_per_proposer_total", labels)
    assert sum(a for _, _, a in drafter.verdicts) == value("dspark:accepted_tokens_per_proposer_total", labels)
    assert len(drafter.verdicts) == value("dspark:verification_rounds_per_proposer_total", labels)
    assert any(num_verified < 3 for _, num_verified, _ in drafter.verdicts)
