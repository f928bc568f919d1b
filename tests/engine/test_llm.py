"""The Python front door over a toy engine."""

from __future__ import annotations

import pytest
from toys import cycle_rule, greedy_continuation, hashed_rule, make_engine, perfect_proposer

from dspark import LLM, SamplingParams
from dspark.errors import RequestError
from dspark.request import FinishReason

RULE = hashed_rule(16)
GREEDY = SamplingParams(temperature=0, max_tokens=6)


@pytest.fixture
def llm():
    return LLM.from_engine(make_engine(RULE, 16, proposer=perfect_proposer(RULE)))


def test_completions_come_in_the_order_of_the_prompts(llm):
    prompts = [[1], [2, 3], [4]]
    completions = llm.generate(prompts, GREEDY, show_progress=False)
    assert [c.token_ids for c in completions] == [greedy_continuation(RULE, p, 6) for p in prompts]
    assert [c.prompt_token_ids for c in completions] == prompts
    assert all(c.finish_reason is FinishReason.LENGTH and 0 < c.ttft_s <= c.latency_s for c in completions)
    assert all(c.speculation.num_emitted == 5 for c in completions)


def test_one_prompt_may_be_text_or_ids(llm):
    (from_text,) = llm.generate("t5", GREEDY, show_progress=False)
    (from_ids,) = llm.generate([5], GREEDY, show_progress=False)
    assert from_text.text == from_ids.text == "".join(f"t{i}" for i in greedy_continuation(RULE, [5], 6))
    assert (from_text.prompt, from_ids.prompt) == ("t5", None)


def test_each_prompt_may_have_its_own_parameters(llm):
    completions = llm.generate([[1], [1]], [GREEDY, SamplingParams(temperature=0, max_tokens=2)], show_progress=False)
    assert [len(c.token_ids) for c in completions] == [6, 2]


def test_a_wrong_number_of_parameters_is_refused(llm):
    with pytest.raises(RequestError, match="1 sampling_params for 2 prompts"):
        llm.generate([[1], [2]], [GREEDY], show_progress=False)


def test_one_bad_prompt_refuses_the_call_before_anything_runs(llm):
    with pytest.raises(RequestError, match="token id 99"):
        llm.generate([[1], [99]], GREEDY, show_progress=False)
    assert not llm.engine.has_unfinished()
    assert llm.engine.runner.num_passes == 0


def test_no_prompts_are_no_completions(llm):
    assert llm.generate([], GREEDY, show_progress=False) == []


def test_an_interrupt_ends_the_call_and_leaves_the_engine_usable():
    calls = iter(range(100))

    def rule(context):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return cycle_rule(16, 16)(context)

    llm = LLM.from_engine(make_engine(rule, 16))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[0], [1]], GREEDY, show_progress=False)
    assert not llm.engine.has_unfinished()
    assert llm.engine.allocator.num_used == 0
    (completion,) = llm.generate([[0]], GREEDY, show_progress=False)
    assert completion.token_ids == [1, 2, 3, 4, 5, 6]


def test_unseeded_requests_draw_fresh_seeds(llm):
    params = SamplingParams(temperature=2.0, max_tokens=20)
    first, second = llm.generate([[1], [1]], params, show_progress=False)
    assert first.token_ids != second.token_ids
