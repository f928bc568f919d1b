"""Every family equals transformers on random weights, however the text is cut into passes and pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, hf_logits, load, make_model, new_cache, random_ids, run
from torch import Tensor

from dspark.batch import BatchRow, build_forward_batch
from dspark.models.decoder import Decoder

TOLERANCE = 1e-4
SHUFFLED_PAGES = [17, 3, 60, 8, 41, 0, 33, 12, 55, 26]  # 10 pages of 4: 40 positions
OTHER_PAGES = [2, 61, 19, 5, 44, 9, 30, 50, 1, 23]


@dataclass(frozen=True, kw_only=True)
class Case:
    decoder: Decoder
    ids: list[int]
    expected: Tensor  # [40, V] transformers' logits
    other_ids: list[int]
    other_expected: Tensor
    hidden_states: tuple[Tensor, ...]  # embedding output and layer outputs, the last after the final norm


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = make_model(request.param)
    folder: Path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    ids, other_ids = random_ids(40, seed=1), random_ids(40, seed=2)
    with torch.no_grad():
        output = model(torch.tensor([ids]), output_hidden_states=True)
    return Case(
        decoder=load(folder),
        ids=ids,
        expected=output.logits[0],
        other_ids=other_ids,
        other_expected=hf_logits(model, other_ids),
        hidden_states=tuple(states[0] for states in output.hidden_states),
    )


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_one_pass_over_the_prompt_equals_transformers(case: Case) -> None:
    [logits] = run(case.decoder, new_cache(case.decoder), [(case.ids, 0, SHUFFLED_PAGES)])
    assert_close(logits, case.expected)


@pytest.mark.parametrize("chunk", [3, 16, 27])
def test_chunked_prefill_equals_transformers(case: Case, chunk: int) -> None:
    cache = new_cache(case.decoder)
    parts = [
        run(case.decoder, cache, [(case.ids[start : start + chunk], start, SHUFFLED_PAGES)])[0]
        for start in range(0, 40, chunk)
    ]
    assert_close(torch.cat(parts), case.expected)


def test_token_by_token_decoding_equals_transformers(case: Case) -> None:
    cache = new_cache(case.decoder)
    parts = [run(case.decoder, cache, [([token], i, SHUFFLED_PAGES)])[0] for i, token in enumerate(case.ids)]
    assert_close(torch.cat(parts), case.expected)


def test_ragged_batch_of_prefill_verification_and_decode_equals_transformers(case: Case) -> None:
    cache = new_cache(case.decoder)
    third_pages = [6, 7, 10, 11, 13, 14, 15, 16, 18, 20]
    run(case.decoder, cache, [(case.ids[:21], 0, SHUFFLED_PAGES), (case.other_ids[:33], 0, OTHER_PAGES)])
    decode, verify, prefill = run(
        case.decoder,
        cache,
        [
            (case.ids[21:22], 21, SHUFFLED_PAGES),
            (case.other_ids[33:38], 33, OTHER_PAGES),
            (case.ids[:30], 0, third_pages),
        ],
    )
    assert_close(decode, case.expected[21:22])
    assert_close(verify, case.other_expected[33:38])
    assert_close(prefill, case.expected[:30])


def test_rejected_tokens_leave_no_trace_once_overwritten(case: Case) -> None:
    cache = new_cache(case.decoder)
    run(case.decoder, cache, [(case.ids[:20], 0, SHUFFLED_PAGES)])
    run(case.decoder, cache, [(case.other_ids[:9], 20, SHUFFLED_PAGES)])  # a draft that is thrown away
    [logits] = run(case.decoder, cache, [(case.ids[20:24], 20, SHUFFLED_PAGES)])
    assert_close(logits, case.expected[20:24])


def test_taps_are_the_outputs_of_the_named_layers_in_the_order_given(case: Case) -> None:
    batch = build_forward_batch([BatchRow(token_ids=case.ids, start_position=0, page_ids=SHUFFLED_PAGES)], page_size=4)
    with torch.inference_mode():
        _, taps = case.decoder.forward(batch, new_cache(case.decoder), tapped_layers=(1, -1, 0))
    assert taps is not None
    states = case.hidden_states
    assert_close(taps, torch.cat([states[2], states[0], states[1]], dim=1))


def test_forward_without_taps_returns_the_normed_hidden_states(case: Case) -> None:
    batch = build_forward_batch([BatchRow(token_ids=case.ids, start_position=0, page_ids=SHUFFLED_PAGES)], page_size=4)
    with torch.inference_mode():
        hidden, taps = case.decoder.forward(batch, new_cache(case.decoder))
    assert taps is None
    assert_close(hidden, case.hidden_states[-1])


def test_a_neighbour_changes_nothing_in_a_batch_of_the_same_shape(case: Case) -> None:
    """Same lengths and pages, other tokens beside it: bit-identical logits, else something leaks."""
    first = run(
        case.decoder, new_cache(case.decoder), [(case.ids[:9], 0, SHUFFLED_PAGES), (case.ids[:9], 0, OTHER_PAGES)]
    )
    second = run(
        case.decoder, new_cache(case.decoder), [(case.ids[:9], 0, SHUFFLED_PAGES), (case.other_ids[:9], 0, OTHER_PAGES)]
    )
    assert torch.equal(first[0], second[0])
