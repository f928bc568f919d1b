"""The promise on real decoders: tiny random float32 models with real rounding, real KV and real windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import VOCAB_SIZE, load, make_model
from toys import (
    FunctionProposer,
    Transcript,
    WordTokenizer,
    drain,
    make_requests,
    random_prompts,
    run_requests,
    step_once,
)

from dspark.batch import BatchRow
from dspark.config import BatchingConfig, CacheConfig, EngineConfig, SpeculationConfig
from dspark.engine.engine import Engine
from dspark.engine.page_allocator import PageAllocator
from dspark.engine.runner import Runner
from dspark.models.tokenizer import GenerationDefaults
from dspark.request import SamplingParams
from dspark.speculation.draft_model import DraftModelProposer
from dspark.speculation.ngram import NgramProposer

PROMPTS = random_prompts(20, VOCAB_SIZE, seed=5)
NUM_PAGES, PAGE_SIZE = 80, 4
TIE_GAP = 1e-5  # logits closer than this may fall either way when another number of rows is computed


@pytest.fixture(scope="module", params=["llama", "mistral-window", "gemma2"])
def decoder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make_model(request.param).save_pretrained(folder)
    return load(folder)


@pytest.fixture(scope="module")
def small_decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    make_model("llama", num_hidden_layers=1).save_pretrained(folder)
    return load(folder)


def engine_over(decoder, proposer=None, *, num_draft_tokens=5, num_pages=NUM_PAGES, max_batch_size=6) -> Engine:
    return Engine(
        runner=Runner(decoder, num_pages=num_pages, page_size=PAGE_SIZE),
        tokenizer=WordTokenizer(VOCAB_SIZE),
        allocator=PageAllocator(num_pages, PAGE_SIZE),
        vocab_size=VOCAB_SIZE,
        max_model_len=128,
        config=EngineConfig(
            model="toy",
            speculation=SpeculationConfig(num_draft_tokens=num_draft_tokens),
            batching=BatchingConfig(max_size=max_batch_size, max_batch_tokens=32),
            cache=CacheConfig(page_size=PAGE_SIZE),
        ),
        generation_defaults=GenerationDefaults(eos_token_ids=frozenset()),
        proposer=proposer,
    )


def draft_model_over(decoder) -> DraftModelProposer:
    runner = Runner(decoder, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    return DraftModelProposer(
        runner.execute,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=VOCAB_SIZE,
        max_model_len=256,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
    )


@pytest.fixture(scope="module")
def plain_texts(decoder):
    """Each prompt alone, without drafts."""
    requests = make_requests(PROMPTS, SamplingParams(temperature=0, max_tokens=32))
    return [run_requests(engine_over(decoder), [request])[request.request_id].token_ids for request in requests]


def worst_gap(decoder, prompt, token_ids) -> float:
    """Return by how much any emitted token falls short of the argmax of its own prefix, in one fresh pass (A4)."""
    runner = Runner(decoder, num_pages=NUM_PAGES, page_size=PAGE_SIZE)
    text = [*prompt, *token_ids]
    row = BatchRow(token_ids=text[:-1], start_position=0, page_ids=range(40), num_logits=len(token_ids))
    logits = runner.execute([row])
    emitted = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    return float((logits.amax(dim=1) - emitted).max())


@pytest.mark.parametrize("kind", ["scripted", "random", "ngram", "draft model", "itself"])
def test_greedy_text_is_plain_decodings_on_real_decoders(decoder, small_decoder, plain_texts, kind):
    """A2, A4, A5, H3, H4: ragged accepts around the window's edge, joins, aborts, preemption and prefix hits."""
    generator = np.random.default_rng(1)

    def scripted(context):
        """Right until a random position."""
        index = next(i for i, p in enumerate(PROMPTS) if list(context.token_ids[: len(p)]) == p)
        done = len(context.token_ids) - len(PROMPTS[index])
        right = plain_texts[index][done : done + generator.integers(0, 9)]
        return [*right, *generator.integers(0, VOCAB_SIZE, 9)][: context.num_draft_tokens]

    proposers = {
        "scripted": lambda: FunctionProposer(scripted),
        "random": lambda: FunctionProposer(lambda c: generator.integers(0, VOCAB_SIZE, c.num_draft_tokens).tolist()),
        "ngram": NgramProposer,
        "draft model": lambda: draft_model_over(small_decoder),
        "itself": lambda: draft_model_over(decoder),
    }
    counts = {"vllm:num_preemptions_total": 0.0, "vllm:prefix_cache_hits_total": 0.0}
    for length in (1, 2, 3, 7, 8, 15):
        engine = engine_over(decoder, proposers[kind](), num_draft_tokens=length, num_pages=64)
        requests = make_requests(PROMPTS, SamplingParams(temperature=0, max_tokens=32))
        # Strangers ask what was just asked, so that pages are shared, and leave at once.
        strangers = make_requests(PROMPTS, SamplingParams(temperature=0, max_tokens=32), prefix="stranger")
        transcripts = {r.request_id: Transcript() for r in (*requests, *strangers)}
        for request, stranger in zip(requests, strangers, strict=True):
            engine.add_request(request)
            step_once(engine, transcripts)
            if generator.random() < 0.5:
                engine.add_request(stranger)
                step_once(engine, transcripts)
                engine.abort(stranger.request_id)
        drain(engine, transcripts)
        for name in counts:
            counts[name] += engine.metrics.registry.get_sample_value(name, {"model_name": "toy"})
        for i, prompt in enumerate(PROMPTS):
            token_ids = transcripts[f"r{i}"].token_ids
            assert worst_gap(decoder, prompt, token_ids) < TIE_GAP
            assert token_ids == plain_texts[i], (length, i)
    assert min(counts.values()) > 0, counts


def test_a_target_that_drafts_for_itself_is_fully_accepted(decoder):
    """A6, H1, H2: any hole or surplus in the draft cache would cost acceptance."""
    engine = engine_over(decoder, draft_model_over(decoder), num_draft_tokens=4)
    request = make_requests(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=61))
    (transcript,) = run_requests(engine, request).values()
    stats = transcript.last.speculation
    assert (stats.num_verified, stats.num_accepted, stats.num_rounds) == (48, 48, 12)


def test_seeded_text_does_not_depend_on_the_draft_model_or_the_crowd(decoder, small_decoder):
    """C1, C4: coupled verification with real rounding."""
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=24, top_k=(0, 20)[i % 2]) for i in range(len(PROMPTS))]
    requests = make_requests(PROMPTS, params)
    plain = [run_requests(engine_over(decoder), [r])[r.request_id].token_ids for r in requests]
    rates = []
    for proposer in (draft_model_over(small_decoder), draft_model_over(decoder), NgramProposer()):
        transcripts = run_requests(engine_over(decoder, proposer), requests)
        assert [transcripts[r.request_id].token_ids for r in requests] == plain
        rates.append(min(t.last.speculation.acceptance_rate for t in transcripts.values()))
    assert rates[1] == 1.0  # the target draws with its own noise, drafting for itself too


def test_the_draft_model_keeps_its_acceptance_after_a_prefix_hit_and_a_preemption(decoder):
    """H11, H13, H16: the target as its own drafter stays perfect, so every KV it reads is right."""
    engine = engine_over(decoder, draft_model_over(decoder), num_draft_tokens=3, num_pages=40, max_batch_size=4)
    prompts = [PROMPTS[0] + PROMPTS[1] + [i] for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=60)
    transcripts = run_requests(engine, make_requests(prompts, params))
    assert engine.metrics.registry.get_sample_value("vllm:num_preemptions_total", {"model_name": "toy"}) > 0
    assert sum(t.last.num_cached_tokens for t in transcripts.values()) > 0
    assert {t.last.speculation.acceptance_rate for t in transcripts.values()} == {1.0}


@pytest.mark.parametrize("how", ["error", "abort"])
def test_what_is_not_a_number_does_not_outlive_its_request(decoder, how):
    """The next owner of a broken request's pages reads zeros in their unused slots, not NaN."""
    engine = engine_over(decoder, num_pages=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    healthy = run_requests(engine, make_requests([prompt], SamplingParams(temperature=0, max_tokens=3)))["r0"].token_ids
    engine.add_request(make_requests([[9] * 10], SamplingParams(temperature=0, max_tokens=5), prefix="broken")[0])
    engine.step()
    for pool in engine.runner._kv_cache.pools:
        pool[engine.scheduler.running[0].page_ids] = float("nan")
    if how == "abort":
        engine.abort("broken0")
    (output,) = engine.step()
    assert output.finish_reason == how
    again = run_requests(engine, make_requests([prompt], SamplingParams(temperature=0, max_tokens=3), prefix="s"))
    assert again["s0"].token_ids == healthy


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_a_near_tie_may_fall_either_way_but_nothing_else_may(tmp_path, dtype, gap):
    """A4: two rows of the output head differ by 1e-7; every token is the argmax of its own prefix within the gap."""
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight[11] = model.lm_head.weight[7] * (1 + 1e-7)
    model.save_pretrained(tmp_path)
    decoder = load(tmp_path, dtype)
    for length in (0, 1, 3, 7):
        engine = engine_over(decoder, NgramProposer(), num_draft_tokens=length)
        requests = make_requests(PROMPTS[:6], SamplingParams(temperature=0, max_tokens=32))
        for request, transcript in zip(requests, run_requests(engine, requests).values(), strict=True):
            assert worst_gap(decoder, request.prompt_token_ids, transcript.token_ids) < gap
