"""Who runs, how the token budget and the pages are shared."""

from __future__ import annotations

from toys import FunctionProposer, cycle_rule, hashed_rule, make_engine, make_requests, run_requests, step_once

from dspark.request import Request, SamplingParams


def test_no_step_exceeds_the_token_budget_and_every_decoding_request_gets_its_token():
    """J13: drafts compete, the one target token a step does not."""
    engine = make_engine(
        hashed_rule(16), 16, proposer=FunctionProposer(lambda c: [0] * c.num_draft_tokens), num_draft_tokens=7,
        max_batch_size=8, max_batch_tokens=16,
    )  # fmt: skip
    for request in make_requests([[i] * 9 for i in range(8)], SamplingParams(temperature=0, max_tokens=10)):
        engine.add_request(request)
    while engine.has_unfinished():
        decoding = {s.request_id for s in engine.scheduler.running if s.is_decoding}
        outputs = engine.step()
        assert decoding <= {o.request_id for o in outputs}
    assert max(sum(len(r.token_ids) for r in rows) for rows in engine.runner.rows_per_pass) <= 16


def test_a_long_prompt_is_prefilled_in_chunks_beside_drafting_requests():
    """H13: no token comes out of an intermediate chunk; running requests go on meanwhile."""
    engine = make_engine(
        hashed_rule(16), 16, proposer=FunctionProposer(lambda c: [0] * c.num_draft_tokens), max_batch_tokens=16
    )
    short, long = make_requests([[1], list(range(16)) * 4], SamplingParams(temperature=0, max_tokens=40))
    engine.add_request(short)
    engine.step()
    engine.add_request(long)
    steps_until_long = 0
    while True:
        outputs = {o.request_id for o in engine.step()}
        steps_until_long += 1
        assert short.request_id in outputs
        if long.request_id in outputs:
            break
    assert 4 <= steps_until_long <= 8
    assert all(len(r.token_ids) <= 16 for rows in engine.runner.rows_per_pass for r in rows)


def test_a_prompt_of_any_chunking_gives_the_same_text():
    prompt = [(7 * i) % 16 for i in range(37)]
    texts = set()
    for max_batch_tokens in (16, 17, 23, 64):
        engine = make_engine(hashed_rule(16), 16, max_batch_tokens=max_batch_tokens)
        (transcript,) = run_requests(
            engine, make_requests([prompt], SamplingParams(temperature=0, max_tokens=9))
        ).values()
        texts.add(tuple(transcript.token_ids))
    assert len(texts) == 1


def test_drafts_are_trimmed_before_anyone_is_preempted():
    """H8: pages for two anchors but not for both blocks of drafts."""
    engine = make_engine(
        cycle_rule(16, 16), 16, proposer=FunctionProposer(lambda c: [0] * c.num_draft_tokens), num_draft_tokens=7,
        page_size=1, num_pages=20, prefix_caching=False,
    )  # fmt: skip
    run_requests(engine, make_requests([[1, 2], [3, 4]], SamplingParams(temperature=0, max_tokens=7)))
    assert engine.metrics.registry.get_sample_value("vllm:num_preemptions_total", {"model_name": "toy"}) == 0


def test_requests_are_preempted_and_finish_when_pages_run_out():
    engine = make_engine(hashed_rule(16), 16, page_size=2, num_pages=12, max_model_len=24, prefix_caching=False)
    transcripts = run_requests(
        engine, make_requests([[i] for i in range(4)], SamplingParams(temperature=0, max_tokens=15))
    )
    assert all(len(t.token_ids) == 15 for t in transcripts.values())
    assert engine.metrics.registry.get_sample_value("vllm:num_preemptions_total", {"model_name": "toy"}) > 0


def test_the_oldest_request_is_never_preempted():
    engine = make_engine(hashed_rule(16), 16, page_size=1, num_pages=24, max_model_len=24, prefix_caching=False)
    requests = make_requests([[i] for i in range(5)], SamplingParams(temperature=0, max_tokens=20))
    for request in requests:
        engine.add_request(request)
    num_outputs = 0
    while engine.has_unfinished() and num_outputs < 20:
        num_outputs += sum(o.request_id == "r0" for o in engine.step())
        engine.check_integrity()
        assert any(s.request_id == "r0" for s in engine.scheduler.running) or num_outputs == 20


def test_the_same_prompt_is_computed_once():
    """H16: the hit counter is the same with and without speculation."""
    hits = []
    for proposer in (None, FunctionProposer(lambda c: [0] * c.num_draft_tokens)):
        engine = make_engine(hashed_rule(16), 16, proposer=proposer, num_pages=128)
        prompt = [(5 * i) % 16 for i in range(60)]
        for i in range(3):
            request = Request(
                request_id=str(i), prompt_token_ids=prompt, sampling=SamplingParams(temperature=0, max_tokens=9)
            )
            transcript = run_requests(engine, [request])[str(i)]
            hits.append(transcript.last.num_cached_tokens)
    assert hits == [0, 56, 56, 0, 56, 56]


def test_a_request_waits_for_a_place_and_not_longer():
    engine = make_engine(hashed_rule(16), 16, max_batch_size=1)
    transcripts = run_requests(engine, make_requests([[1], [2]], SamplingParams(temperature=0, max_tokens=3)))
    assert engine.runner.num_passes == 6
    assert [len(t.token_ids) for t in transcripts.values()] == [3, 3]


def test_abort_at_any_phase_frees_the_pages_and_leaves_the_others_alone():
    """H9: queued, in a prefill chunk, with a draft pending; the reused pages serve the next request rightly."""
    rule = hashed_rule(16)
    sampling = SamplingParams(temperature=0, max_tokens=12)
    prompts = [[i] * 30 for i in range(4)]
    alone = {
        r.request_id: run_requests(make_engine(rule, 16), [r])[r.request_id] for r in make_requests(prompts, sampling)
    }
    for abort_step in range(12):
        engine = make_engine(
            rule,
            16,
            proposer=FunctionProposer(lambda c: [0] * c.num_draft_tokens),
            max_batch_tokens=16,
            max_batch_size=3,
        )
        transcripts = {}
        for request in make_requests(prompts, sampling):
            transcripts[request.request_id] = type(alone["r0"])()
            engine.add_request(request)
        for _ in range(abort_step):
            step_once(engine, transcripts)
        engine.abort("r1")
        engine.abort("unknown")
        engine.check_integrity()
        while engine.has_unfinished():
            step_once(engine, transcripts)
        assert transcripts["r1"].finish_reason in ("abort", "length")
        assert engine.allocator.num_used == 0
        for name in ("r0", "r2", "r3"):
            assert transcripts[name].token_ids == alone[name].token_ids


def test_pages_kept_for_drafts_never_hold_up_a_waiting_request():
    """One request drafts, or might: a prompt that fits beside its committed text is admitted at once."""
    for draft in ([], [0] * 20):
        engine = make_engine(
            hashed_rule(16), 16, proposer=FunctionProposer(lambda c, draft=draft: draft), num_draft_tokens=20,
            page_size=1, num_pages=32, max_model_len=32, prefix_caching=False,
        )  # fmt: skip
        first, second = make_requests([[1, 2], [3] * 16], SamplingParams(temperature=0, max_tokens=12))
        engine.add_request(first)
        engine.step()
        engine.add_request(second)
        assert second.request_id in {o.request_id for o in engine.step()}


def test_pages_of_drafts_that_were_not_made_are_given_back():
    engine = make_engine(
        hashed_rule(16), 16, proposer=FunctionProposer(lambda c: []), num_draft_tokens=20, page_size=1, num_pages=64
    )
    engine.add_request(make_requests([[1, 2]], SamplingParams(temperature=0, max_tokens=30))[0])
    engine.step()
    assert engine.allocator.num_used == 3


def test_a_request_without_drafts_costs_neither_a_proposal_nor_a_page():
    """J6"""
    proposer = FunctionProposer(lambda c: [0] * c.num_draft_tokens)
    engine = make_engine(hashed_rule(16), 16, proposer=proposer, page_size=1)
    engine.add_request(make_requests([[1]], SamplingParams(temperature=0, max_tokens=9, num_draft_tokens=0))[0])
    for num_computed in range(1, 9):
        engine.step()
        assert engine.allocator.num_used == num_computed
    assert proposer.lengths == []
