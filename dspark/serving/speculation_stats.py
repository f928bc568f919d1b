"""How drafting went in a request, as JSON: under the names that vLLM uses, and ours for what it does not tell."""

from __future__ import annotations

from typing import Any

from dspark.request import SpeculationStats


def speculation_fields(stats: SpeculationStats) -> dict[str, Any]:
    """Return `metrics.speculative_decoding`.

    vLLM's fields are about rounds that verified a draft: their number, drafted tokens that were verified, accepted
    ones, tokens per round with the target's own (1 + accepted per round), by j how many accepted j tokens, and the
    longest draft allowed. Ours are about all decoding rounds: tokens proposed (verified or not), and what came out.
    """
    num_steps = sum(stats.accepted_counts)
    return {
        "mean_acceptance_length": 1.0 + stats.num_accepted / num_steps if num_steps else None,
        "draft_acceptance_rate": stats.acceptance_rate if num_steps else None,
        "acceptance_histogram": list(stats.accepted_counts),
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": stats.num_accepted,
        "num_draft_tokens": stats.num_verified,
        "num_spec_tokens": stats.max_draft_tokens,
        "num_rounds": stats.num_rounds,
        "num_proposed_tokens": stats.num_drafted,
        "num_emitted_tokens": stats.num_emitted,
        "tokens_per_round": stats.accepted_length if stats.num_rounds else None,
    }
