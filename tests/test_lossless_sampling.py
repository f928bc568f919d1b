"""Unseeded sampling through the whole engine has the target's joint law, for every rule and kind of drafter.

The engine draws a fresh seed per request; here the seeds are 0, 1, 2, ... so that a run is reproducible. Each test
compares the counts of 27 possible three-token texts with the exact law: chi-square with 26 degrees of freedom,
threshold 54.05, false alarm 0.001 for a fresh set of seeds.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from toys import FunctionProposer, make_engine, make_requests, run_requests, soft_proposer, table_rule

from dspark.engine import engine as engine_module
from dspark.request import SamplingParams

TABLE = np.array([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])
NUM_REQUESTS = 4000
CHI_SQUARE_26 = 54.05


@pytest.fixture
def counted_seeds(monkeypatch):
    seeds = itertools.count()
    monkeypatch.setattr(engine_module, "request_seed", lambda _: next(seeds))


def restricted(probs: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The request's distribution from first principles: temperature, top_k, top_p, min_p."""
    scaled = probs ** (1 / params.temperature)
    scaled = scaled / scaled.sum()
    order = np.argsort(-scaled, kind="stable")
    kept = order[: params.top_k or None]
    mass = scaled[kept] / scaled[kept].sum()
    kept = kept[: int((mass.cumsum() < params.top_p - 1e-9).sum()) + 1]
    kept = kept[scaled[kept] >= params.min_p * scaled.max()]
    result = np.zeros_like(scaled)
    result[kept] = scaled[kept]
    return result / result.sum()


def chi_square(transcripts, params: SamplingParams) -> float:
    law = np.stack([restricted(row, params) for row in TABLE])
    counts = np.zeros((3, 3, 3))
    for transcript in transcripts:
        counts[tuple(transcript.token_ids)] += 1
    expected = NUM_REQUESTS * law[0][:, None, None] * law[:, :, None] * law[None, :, :]
    assert (counts[expected == 0] == 0).all(), "a text of probability 0 came out"
    return float(((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum())


PROPOSERS = {
    "none": lambda: None,
    "soft": lambda: soft_proposer(table_rule(TABLE), 3),
    "deterministic": lambda: FunctionProposer(lambda c: [1] * c.num_draft_tokens),
}
PARAMS = {
    "plain": SamplingParams(temperature=1.0, max_tokens=3),
    "warm": SamplingParams(temperature=1.7, max_tokens=3, min_p=0.2),
    "nucleus": SamplingParams(temperature=0.8, max_tokens=3, top_p=0.8),
    "top two": SamplingParams(temperature=1.0, max_tokens=3, top_k=2),
}


@pytest.mark.usefixtures("counted_seeds")
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("proposer", PROPOSERS.values(), ids=PROPOSERS.keys())
@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_unseeded_texts_have_the_targets_law(verification, proposer, params):
    """B1, B5, B6, B7, B12: the tokens of later rounds depend on those of earlier ones as the target says."""
    engine = make_engine(
        table_rule(TABLE), 3, proposer=proposer(), num_draft_tokens=2, verification=verification, max_batch_size=48,
        num_pages=256, prefix_caching=False,
    )  # fmt: skip
    transcripts = run_requests(engine, make_requests([[0]] * NUM_REQUESTS, params), max_steps=10**6)
    assert chi_square(transcripts.values(), params) < CHI_SQUARE_26


@pytest.mark.usefixtures("counted_seeds")
def test_the_test_notices_a_wrong_rule(monkeypatch):
    """A verifier that replaces rejected tokens from p instead of the residual must fail it."""
    from dspark.speculation import verification

    monkeypatch.setattr(verification, "_residual", lambda judged, k, scale: judged.probs[k])
    engine = make_engine(
        table_rule(TABLE),
        3,
        proposer=PROPOSERS["deterministic"](),
        num_draft_tokens=2,
        max_batch_size=48,
        num_pages=256,
    )
    params = PARAMS["plain"]
    transcripts = run_requests(engine, make_requests([[0]] * NUM_REQUESTS, params), max_steps=10**6)
    assert chi_square(transcripts.values(), params) > CHI_SQUARE_26


@pytest.mark.parametrize(
    ("configured", "seed", "method"),
    [("rejection", None, "rejection"), ("block", None, "block"), ("coupled", None, "coupled"), ("block", 3, "coupled")],
)
def test_the_configured_rule_judges_unseeded_requests_and_coupling_the_seeded(monkeypatch, configured, seed, method):
    methods = set()
    original = engine_module.verify_batch

    def spy(logits, rows):
        methods.update(row.method for row in rows)
        return original(logits, rows)

    monkeypatch.setattr(engine_module, "verify_batch", spy)
    engine = make_engine(table_rule(TABLE), 3, proposer=PROPOSERS["soft"](), verification=configured)
    run_requests(engine, make_requests([[0]], SamplingParams(max_tokens=4, seed=seed)))
    assert methods == {method}
