"""The draft model's KV bookkeeping: its drafts always equal those of a model without a cache."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_draft_model import GREEDY, DraftBench

from dspark.request import SamplingParams
from dspark.speculation.noise import KeyedNoise, NoisePurpose
from dspark.speculation.proposal import NO_DRAFT
from dspark.speculation.sampling import race, sample_from, target_probs
from dspark.speculation.verification import VerificationRow, verify_batch

SAMPLED = SamplingParams(temperature=0.8, top_p=0.9)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
K = 4


def verify(bench: DraftBench, request, draft, *, sampling=GREEDY, seed=0, method="rejection") -> list[int]:
    """Verify with the drafter's own model as the target, commit, and return the emitted tokens."""
    drafted = draft.token_ids
    logits = torch.stack(
        [bench.model.reference_logits([*request.token_ids, *drafted[:k]]) for k in range(len(drafted) + 1)]
    )
    row = VerificationRow(
        draft=draft,
        sampling=sampling,
        seed=seed,
        method=method,
        anchor_position=len(request.token_ids) - 1,
    )
    result = verify_batch(logits, [row])[0]
    request.token_ids.extend(result.token_ids)
    return result.token_ids


@pytest.mark.parametrize(
    ("sampling", "method"), [(GREEDY, "rejection"), (SAMPLED, "rejection"), (SAMPLED, "block"), (SAMPLED, "coupled")]
)
def test_a_drafter_equal_to_the_target_is_always_fully_accepted(sampling, method):
    """Cases A6, B1, H2: 25 rounds of k + 1 tokens; a hole after a full round would change the next drafts."""
    bench = DraftBench()
    request = bench.request("a", PROMPT)
    for round_index in range(25):
        num_before = bench.model.num_fed
        draft = bench.propose(request, sampling=sampling, seed=5, is_coupled=method == "coupled")[0]
        assert len(verify(bench, request, draft, sampling=sampling, seed=5, method=method)) == K + 1
        # the last draft of the round before, the anchor, and K - 1 drafts
        assert bench.model.num_fed - num_before == (len(PROMPT) if round_index == 0 else 2) + K - 1
    slots = [request.page_ids[p // 4] * 4 + p % 4 for p in range(len(request.token_ids) - K - 1)]
    fresh = DraftBench()
    fresh_request = fresh.request("a", request.token_ids[: len(slots)])
    fresh.draft(fresh_request)
    fresh_slots = [fresh_request.page_ids[p // 4] * 4 + p % 4 for p in range(len(slots))]
    assert bench.model.pool[slots].tolist() == fresh.model.pool[fresh_slots].tolist()


def test_every_pattern_of_acceptance_keeps_the_cache_right():
    """Case H1: 200 rounds; whatever was rejected, the next draft is that of the committed text, at least cost."""
    bench = DraftBench(num_pages=300)
    request = bench.request("a", PROMPT)
    generator = np.random.default_rng(1)
    patterns = [*range(K + 1), *generator.integers(0, K + 1, size=195).tolist()]
    num_missing = len(PROMPT)
    for num_accepted in patterns:
        num_before = bench.model.num_fed
        drafted = bench.draft(request)
        assert drafted == bench.model.greedy(request.token_ids, K)
        assert bench.model.num_fed - num_before == num_missing + K - 1
        corrected = (drafted[num_accepted] + 1) % 32 if num_accepted < K else 7
        request.token_ids.extend([*drafted[:num_accepted], corrected])
        num_missing = 2 if num_accepted == K else 1


def test_requests_in_a_batch_get_the_drafts_they_get_alone():
    bench = DraftBench()
    prompts = [PROMPT, [7], [8, 8, 8, 8], PROMPT[:5]]
    settings = [GREEDY, SAMPLED, GREEDY, SAMPLED]
    requests = [bench.request(str(i), prompt) for i, prompt in enumerate(prompts)]
    contexts = [
        request.context(k, sampling=sampling, seed=i, is_coupled=i == 3)
        for i, (request, sampling, k) in enumerate(zip(requests, settings, (4, 1, 2, 3), strict=True))
    ]
    drafts = bench.proposer.propose(contexts)
    assert [len(draft.token_ids) for draft in drafts] == [4, 1, 2, 3]
    assert [draft.probs is None for draft in drafts] == [True, False, True, True]
    for i, draft in enumerate(drafts):
        alone = DraftBench()
        request = alone.request("x", prompts[i])
        expected = alone.propose(
            request,
            num_draft_tokens=len(draft.token_ids),
            sampling=settings[i],
            seed=i,
            is_coupled=i == 3,
        )[0]
        assert draft.token_ids == expected.token_ids


def test_the_batch_takes_one_pass_per_draft_position():
    bench = DraftBench()
    bench.propose(bench.request("a", PROMPT), bench.request("b", [7, 7]), num_draft_tokens=3)
    assert bench.model.passes == [[2, 9], [1, 1], [1, 1]]  # shortest catch-up first


def test_a_sampled_draft_carries_the_very_vectors_it_was_drawn_from():
    """Cases B1, B2, B3: the request's own filters, proposal noise of this anchor and position."""
    bench = DraftBench()
    request = bench.request("a", PROMPT)
    draft = bench.propose(request, sampling=SAMPLED, seed=77)[0]
    text = list(PROMPT)
    for k, token_id in enumerate(draft.token_ids):
        q = target_probs(bench.model.reference_logits(text).unsqueeze(0), [SAMPLED])[0][0]
        assert torch.equal(draft.probs[k], q) and draft.probs.dtype == torch.float32
        position = len(PROMPT) + k
        uniform = KeyedNoise(77).uniform(NoisePurpose.PROPOSAL, anchor_position=len(PROMPT) - 1, position=position)
        assert token_id == sample_from(q, uniform)
        assert q[token_id] > 0
        text.append(token_id)


def test_low_precision_logits_are_judged_as_they_were_drawn():
    """Case B3: bfloat16 logits become one float32 vector."""
    bench = DraftBench()
    execute = bench.model.execute
    bench.proposer._execute = lambda rows: execute(rows).to(torch.bfloat16)
    draft = bench.propose(bench.request("a", PROMPT), num_draft_tokens=1, sampling=SAMPLED)[0]
    logits = bench.model.reference_logits(PROMPT).to(torch.bfloat16).float()
    assert torch.equal(draft.probs, target_probs(logits.unsqueeze(0), [SAMPLED])[0])


def test_a_coupled_draft_races_with_the_targets_noise():
    bench = DraftBench()
    draft = bench.propose(bench.request("a", PROMPT), sampling=SAMPLED, seed=9, is_coupled=True)[0]
    text = list(PROMPT)
    for token_id in draft.token_ids:
        p = target_probs(bench.model.reference_logits(text).unsqueeze(0), [SAMPLED])[0][0]
        assert token_id == race(p, KeyedNoise(9).exponential(len(text), 32))
        text.append(token_id)
    assert draft.probs is None


def test_a_draft_made_again_from_the_same_text_is_the_same():
    """Case C4: a discarded proposal is redrawn with the same noise."""
    bench = DraftBench()
    request = bench.request("a", PROMPT)
    first, second = (bench.propose(request, sampling=SAMPLED, seed=3)[0] for _ in range(2))
    assert first.token_ids == second.token_ids and torch.equal(first.probs, second.probs)


@pytest.mark.parametrize("is_coupled", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_padding_of_the_draft_head_is_never_proposed(sampling, is_coupled):
    """Case I1: rows 24 to 31 of the head are beyond the target's vocabulary and hold the largest logits."""
    bench = DraftBench(model_vocab_size=32, vocab_size=24)
    execute = bench.model.execute

    def execute_with_large_padding(rows):
        logits = execute(rows)
        logits[:, 24:] = 100.0
        return logits

    bench.proposer._execute = execute_with_large_padding
    draft = bench.propose(bench.request("a", PROMPT), sampling=sampling, is_coupled=is_coupled)[0]
    assert len(draft.token_ids) == K and max(draft.token_ids) < 24
    if draft.probs is not None:
        assert draft.probs.shape == (K, 24)
        assert draft.probs.sum(dim=-1).tolist() == pytest.approx([1.0] * K, abs=1e-6)


def test_a_smaller_draft_head_has_probability_zero_beyond_it():
    """Cases B15, I3."""
    bench = DraftBench(model_vocab_size=24, vocab_size=32)
    draft = bench.propose(bench.request("a", PROMPT), sampling=SAMPLED)[0]
    assert draft.probs.shape == (K, 32)
    assert draft.probs[:, 24:].abs().sum() == 0
    assert draft.probs.sum(dim=-1).tolist() == pytest.approx([1.0] * K, abs=1e-6)
    coupled = bench.propose(bench.request("b", PROMPT), num_draft_tokens=1, sampling=SAMPLED, seed=1, is_coupled=True)
    p = target_probs(bench.model.reference_logits(PROMPT).unsqueeze(0), [SAMPLED])[0][0]
    noise_of_all = KeyedNoise(1).exponential(len(PROMPT), 32)
    assert coupled[0].token_ids == [race(torch.nn.functional.pad(p, (0, 8)), noise_of_all)]


def test_a_text_near_the_draft_models_limit_gets_shorter_drafts_then_none():
    """Case D11: the other request keeps drafting."""
    bench = DraftBench(max_model_len=14)
    long, short = bench.request("long", PROMPT), bench.request("short", [1, 2])
    lengths = []
    for _ in range(7):
        drafts = bench.propose(long, short)
        lengths.append([len(draft.token_ids) for draft in drafts])
        assert drafts[0].token_ids == bench.model.greedy(long.token_ids, lengths[-1][0])
        long.token_ids.append(7)
    assert lengths == [[4, 4], [4, 4], [3, 4], [2, 4], [1, 4], [0, 4], [0, 4]]


def test_one_token_prompts_are_drafted_for():
    """Case K5."""
    bench = DraftBench()
    assert bench.draft(bench.request("a", [0])) == bench.model.greedy([0], K)


def test_drafts_after_a_pause_equal_those_of_a_fresh_proposer():
    """The engine decoded 9 tokens without asking for drafts."""
    bench = DraftBench()
    request = bench.request("a", PROMPT)
    bench.draft(request)
    request.token_ids.extend([11, 12, 13, 14, 15, 16, 17, 18, 19])
    num_fed = bench.num_fed_by(lambda: verify_draft_is_fresh(bench, request))
    assert num_fed == 9 + K - 1


def verify_draft_is_fresh(bench: DraftBench, request) -> None:
    assert bench.draft(request) == bench.model.greedy(request.token_ids, K)


def test_a_page_with_a_new_owner_is_never_trusted():
    """The second request gets the very pages of the first, with other text in them."""
    bench = DraftBench(num_pages=4)
    first = bench.request("a", PROMPT[:8])
    bench.draft(first)
    first.give_back()
    bench.proposer.release("a")
    second = bench.request("b", [2, 7, 1, 8, 2, 8, 1, 8])
    assert bench.num_fed_by(lambda: verify_draft_is_fresh(bench, second)) == 8 + K - 1


def test_a_reused_id_without_release_starts_afresh():
    bench = DraftBench()
    bench.draft(bench.request("a", PROMPT))
    other = bench.request("a", [*PROMPT[:6], 30, 31])
    assert bench.num_fed_by(lambda: verify_draft_is_fresh(bench, other)) == 8 + K - 1


def test_shared_prompt_pages_are_fed_once():
    """Case H16: two full pages of 4 come from the prefix cache, one token is left."""
    bench = DraftBench()
    first = bench.request("a", PROMPT)
    bench.draft(first)
    second = bench.request("b", PROMPT, shared=first.page_ids[:2])
    assert bench.num_fed_by(lambda: verify_draft_is_fresh(bench, second)) == 1 + K - 1


def test_shared_pages_outlive_the_request_that_filled_them():
    bench = DraftBench()
    first = bench.request("a", PROMPT)
    bench.draft(first)
    bench.proposer.release("a")
    second = bench.request("b", [*PROMPT[:8], 20, 21], shared=first.page_ids[:2])
    assert bench.num_fed_by(lambda: verify_draft_is_fresh(bench, second)) == 2 + K - 1


def test_a_shared_page_that_the_drafter_never_filled_is_fed():
    """The target computed it while drafting was off; only the second of three shared pages is unknown."""
    bench = DraftBench()
    text = [*PROMPT, 10, 11, 12, 13]
    first = bench.request("a", text[:4])
    bench.draft(first)
    pages = first.page_ids[:1]
    pages += [bench.allocator.take(), bench.allocator.take()]
    second = bench.request("b", text, shared=pages)
    assert bench.num_fed_by(lambda: verify_draft_is_fresh(bench, second)) == 9 + K - 1


def test_a_page_partly_filled_with_drafts_is_not_shared():
    """Six committed tokens and drafts behind them fill two pages, but only the first holds committed text alone."""
    bench = DraftBench()
    first = bench.request("a", PROMPT[:6])
    drafted = bench.draft(first)
    committed = [*PROMPT[:6], *[(token_id + 1) % 32 for token_id in drafted[:2]], 5]
    second = bench.request("b", committed, shared=first.page_ids[:2])
    assert bench.num_fed_by(lambda: verify_draft_is_fresh(bench, second)) == 5 + K - 1


def test_a_whole_cached_prompt_still_feeds_its_anchor():
    bench = DraftBench()
    first = bench.request("a", PROMPT[:8])
    bench.draft(first)
    second = bench.request("b", PROMPT[:8], shared=first.page_ids[:2])
    assert bench.num_fed_by(lambda: verify_draft_is_fresh(bench, second)) == 1 + K - 1


@pytest.mark.parametrize("has_prefix_hit", [False, True])
def test_a_preempted_request_gets_the_drafts_it_would_have_had(has_prefix_hit):
    """Case H11: released, its pages taken by others, admitted again with all its text."""
    bench = DraftBench(num_pages=16)
    request = bench.request("a", PROMPT)
    for _ in range(3):
        request.token_ids.extend(bench.draft(request)[:2])
    bench.draft(request)
    kept = request.page_ids[:3] if has_prefix_hit else []
    request.page_ids = [page for page in request.page_ids if page not in kept]
    request.give_back()
    bench.proposer.release("a")
    bench.draft(bench.request("intruder", [9] * 20))
    again = bench.request("a", request.token_ids, shared=kept)
    num_missing = len(request.token_ids) - 4 * len(kept)
    assert bench.num_fed_by(lambda: verify_draft_is_fresh(bench, again)) == num_missing + K - 1


def test_trimmed_and_regrown_pages_are_not_trusted():
    """The engine gave the spare last page back; another request wrote it before it came back."""
    bench = DraftBench()
    request = bench.request("a", PROMPT[:7])
    drafted = bench.draft(request)
    request.token_ids.extend(drafted[:3])  # positions 8 and 9 stand in the third page
    taken = request.page_ids.pop()
    request.page_serials.pop()
    bench.model.pool[taken * 4 : taken * 4 + 4] = 0
    bench.allocator.free.append(taken)
    assert bench.num_fed_by(lambda: verify_draft_is_fresh(bench, request)) == 2 + K - 1
    assert taken in request.page_ids


@pytest.mark.parametrize("failing_pass", [0, 1, 3])
def test_after_a_failed_pass_the_next_drafts_are_right(failing_pass):
    """The pass writes garbage into its slots before it raises."""
    bench = DraftBench()
    request = bench.request("a", PROMPT)
    request.token_ids.extend(bench.draft(request)[:2])
    bench.model.fail_on_pass = len(bench.model.passes) + failing_pass
    with pytest.raises(RuntimeError, match="device"):
        bench.propose(request)
    for _ in range(3):
        verify_draft_is_fresh(bench, request)
        request.token_ids.extend(bench.draft(request))


def test_a_failed_pass_spoils_the_full_page_it_wrote_again():
    """The anchor ends a full page; feeding it again for the same text fails half-way."""
    bench = DraftBench()
    request = bench.request("a", PROMPT[:8])
    bench.draft(request)
    bench.model.fail_on_pass = len(bench.model.passes)
    with pytest.raises(RuntimeError, match="device"):
        bench.propose(request)
    other = bench.request("b", PROMPT, shared=request.page_ids[:2])
    verify_draft_is_fresh(bench, other)
    request.token_ids.append(7)
    verify_draft_is_fresh(bench, request)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("nan_pass", "length"), [(0, 0), (2, 2)])
def test_unusable_draft_logits_switch_the_request_off(nan_pass, length, sampling):
    """What was drafted before stands; the model is not asked again, and its pages are not trusted by others."""
    bench = DraftBench()
    request, neighbour = bench.request("a", PROMPT), bench.request("b", [8, 8])
    bench.draft(neighbour)
    bench.model.nan_on_pass = len(bench.model.passes) + nan_pass
    assert len(bench.draft(request, sampling=sampling)) == length
    request.token_ids.append(7)
    assert bench.num_fed_by(lambda: bench.draft(request)) == 0
    assert bench.propose(request, neighbour)[1].token_ids == bench.model.greedy([8, 8], K)
    verify_draft_is_fresh(bench, bench.request("c", PROMPT, shared=request.page_ids[:2]))
    bench.proposer.release("a")
    verify_draft_is_fresh(bench, request)


def test_a_long_text_is_fed_over_several_calls_and_holds_nobody_up():
    """Case H13: 20 tokens a call; the short request drafts from the first call on."""
    bench = DraftBench(max_batch_tokens=20)
    long = bench.request("long", [i % 31 for i in range(50)])
    short = bench.request("short", PROMPT)
    lengths = []
    for _ in range(4):
        num_passes = len(bench.model.passes)
        drafts = bench.propose(long, short)
        lengths.append([len(draft.token_ids) for draft in drafts])
        assert sum(bench.model.passes[num_passes]) <= 20
        assert drafts[1].token_ids == bench.model.greedy(short.token_ids, K)
        short.token_ids.append(drafts[1].token_ids[0])
        long.token_ids.append(6)
    assert lengths == [[0, 4], [0, 4], [0, 4], [4, 4]]  # 11, 19, 19 and 4 tokens of the long one
    verify_draft_is_fresh(bench, long)


def test_release_forgets_the_request_and_is_harmless_for_unknown_ids():
    bench = DraftBench()
    bench.proposer.release("nobody")
    bench.draft(bench.request("a", PROMPT))
    assert bench.proposer.num_requests == 1
    bench.proposer.release("a")
    assert bench.proposer.num_requests == 0
    assert bench.proposer.propose([]) == []


@pytest.mark.parametrize("seed", range(3))
def test_any_history_of_events_leaves_the_drafts_right(seed):
    """Random joins with shared prefixes, rounds, pauses, preemptions, failures and ends, 150 events."""
    bench = DraftBench(num_pages=40, max_batch_tokens=64)
    generator = np.random.default_rng(seed)
    requests: list = []
    num_checked = 0
    for event in range(150):
        if len(requests) < 3:
            prompt = [*PROMPT, *generator.integers(0, 32, size=int(generator.integers(0, 6))).tolist()]
            donors = [r for r in requests if len(r.page_ids) >= 2]
            requests.append(bench.request(str(event), prompt, shared=donors[0].page_ids[:2] if donors else ()))
        request = requests[int(generator.integers(len(requests)))]
        kind = generator.choice(["round", "round", "round", "pause", "preempt", "fail", "end"])
        if kind == "pause":
            request.token_ids.extend(generator.integers(0, 32, size=3).tolist())
        elif kind in ("preempt", "end") or len(request.token_ids) > 30:
            users = [page for other in requests if other is not request for page in other.page_ids]
            request.page_ids = [page for page in request.page_ids if page not in users]
            request.give_back()
            bench.proposer.release(request.name)
            if kind != "preempt" or len(request.token_ids) > 30:
                requests.remove(request)
        elif kind == "fail":
            bench.model.fail_on_pass = len(bench.model.passes) + int(generator.integers(2))
            with pytest.raises(RuntimeError):
                bench.propose(*requests)
        else:
            for member, draft in zip(requests, bench.propose(*requests), strict=True):
                assert draft.token_ids == bench.model.greedy(member.token_ids, K)
                num_checked += 1
                kept = draft.token_ids[: int(generator.integers(K + 1))]
                member.token_ids.extend([*kept, int(generator.integers(32))])
    assert num_checked > 100


def test_a_text_with_ids_the_draft_model_cannot_read_gets_no_draft_and_holds_nobody_up():
    """I3: the target has rows beyond the draft model's embedding."""
    bench = DraftBench(model_vocab_size=24, vocab_size=32)
    readable, unreadable = bench.request("a", [1, 2, 3]), bench.request("b", [1, 30, 3])
    drafts = bench.propose(readable, unreadable)
    assert len(drafts[0].token_ids) > 0
    assert drafts[1].token_ids == []


# -- what to expect of a draft, and who joins the passes -----------------------------------------------------------


def test_confidences_are_the_rates_of_each_position_known_before_the_draw():
    """One draft of four: two accepted, the third wrong; 0.5 counts as 20 tokens, the rates of all as 4 for this one."""
    bench = DraftBench()
    a, b = bench.request("a", PROMPT), bench.request("b", [7, 7])
    (draft, _) = bench.propose(a, b)
    assert draft.confidences == [0.5] * K and all(type(c) is float for c in draft.confidences)
    bench.proposer.take_verdict("a", draft, 2)
    right, wrong = 11 / 21, 10 / 21
    own = [(1 + 4 * right) / 5, (1 + 4 * right) / 5, 4 * wrong / 5, 0.5]
    forecasts = bench.proposer.forecast([a.context(), b.context()])
    assert forecasts[0].paid == pytest.approx(np.cumprod(own).tolist())
    assert forecasts[1].paid == pytest.approx(np.cumprod([right, right, wrong, 0.5]).tolist())
    assert not forecasts[0].free
    drafts = bench.propose(a, b, sampling=SAMPLED, num_draft_tokens=3)
    assert drafts[0].confidences == pytest.approx(own[:3])
    assert drafts[1].confidences == pytest.approx([right, right, wrong])


def test_a_trimmed_draft_says_nothing_of_what_was_cut_off():
    bench = DraftBench()
    request = bench.request("a", PROMPT)
    draft = bench.propose(request)[0]
    bench.proposer.take_verdict("a", draft.prefix(1), 1)
    first = (1 + 4 * 11 / 21) / 5
    assert bench.proposer.forecast([request.context()])[0].paid == pytest.approx([first / 2**k for k in range(K)])


def test_requests_that_do_not_join_cost_nothing_and_catch_up_when_they_do():
    bench = DraftBench()
    joining, declined = bench.request("a", PROMPT), bench.request("b", [7, 8, 9])
    contexts = [joining.context(), replace(declined.context(), joins_pass=False)]
    drafts = bench.proposer.propose(contexts)
    assert drafts[1] is NO_DRAFT
    assert drafts[0].token_ids == bench.model.greedy(PROMPT, K)
    assert bench.model.passes == [[len(PROMPT)], [1], [1], [1]]
    declined.token_ids.extend([1, 2])
    assert bench.num_fed_by(lambda: verify_draft_is_fresh(bench, declined)) == 5 + K - 1


def test_where_nobody_joins_no_tensor_is_touched(monkeypatch):
    """Case J6."""
    bench = DraftBench()
    request = bench.request("a", PROMPT)
    monkeypatch.setattr("dspark.speculation.draft_model.torch", None)
    assert bench.proposer.propose([replace(request.context(), joins_pass=False)] * 3) == [NO_DRAFT] * 3
    assert bench.model.passes == []
    assert bench.proposer.has_pass


def test_a_request_that_gets_no_drafts_has_no_forecast():
    bench = DraftBench(max_model_len=11)
    near, broken = bench.request("near", PROMPT), bench.request("broken", [8, 8])
    bench.model.nan_on_pass = 0
    bench.propose(broken)
    contexts = [near.context(), broken.context(), bench.request("new", [1]).context()]
    assert [len(forecast.paid) for forecast in bench.proposer.forecast(contexts)] == [2, 0, K]


def test_a_request_id_that_comes_again_starts_from_what_all_requests_taught():
    """Case J9."""
    bench = DraftBench()
    request = bench.request("a", PROMPT)
    for _ in range(30):
        bench.proposer.take_verdict("a", bench.propose(request)[0], 0)
    assert bench.proposer.forecast([request.context()])[0].paid[0] < 0.1
    bench.proposer.release("a")
    again = bench.proposer.forecast([request.context()])
    assert again == bench.proposer.forecast([bench.request("new", PROMPT).context()])
    assert 0.1 < again[0].paid[0] < 0.5


def test_rates_of_all_requests_survive_a_restart(caplog):
    bench, restarted = DraftBench(), DraftBench()
    request = bench.request("a", PROMPT)
    bench.proposer.take_verdict("a", bench.propose(request)[0], 1)
    restarted.proposer.restore_state(json.loads(json.dumps(bench.proposer.export_state())))
    bench.proposer.release("a")
    assert restarted.proposer.forecast([request.context()]) == bench.proposer.forecast([request.context()])
    assert caplog.text == ""
    restarted.proposer.restore_state({"positions": {"1": [1, 1]}})
    assert "'positions' of the draft_model drafter are ignored" in caplog.text
    assert restarted.proposer.forecast([request.context()]) == bench.proposer.forecast([request.context()])
