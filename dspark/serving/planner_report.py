"""What the planner decided lately and why, in words for those who run or use the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspark.serving.live_stats import DECLINED, DRAFTS, NOW_S, PLANNED_LEN, PROBES, WINDOW_S, LiveStats, Span

MENTIONED_SHARE = 0.05  # of the rounds: what is rarer is not in the summary

STATES = {
    "on": "Speculation is on: drafts are made where they are expected to save time.",
    "switched_off": "Speculation was switched off by an administrator: every token is decoded plainly.",
    "open": "The drafter failed again and again and rests: answers go on plainly, and it is tried again by itself.",
    "probing": "The drafter had failed and is being tried again.",
    "none": "This server has no drafter: every token is decoded plainly.",
}
# By the reason under which the metrics count a request that gets no draft.
REASONS = {
    "not_worth_it": (
        "not worth it",
        "By this machine's measured times, drafting for this request would have cost more than it promised to save.",
    ),
    "resting": (
        "pause",
        "With this many requests, looking for drafts gained next to nothing lately, so it pauses and tries again soon.",
    ),
    "no_room": (
        "no room",
        "The answer is about to end, the request wants no drafts, or KV pages or a step's token budget are used up.",
    ),
    "breaker": ("drafter at fault", "The drafter failed and rests for a while; it is tried again by itself."),
    "switched_off": ("switched off", "An administrator switched speculation off."),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One thing that became of decoding rounds, one round for each request of a step."""

    name: str
    label: str
    explanation: str
    count: float


def outcomes(span: Span) -> list[Outcome]:
    """Return what became of the rounds of a span: verified a draft, kept all of it back, or had none and why."""
    drafted = Outcome(
        name="verified",
        label="draft verified",
        explanation="The target checked drafted tokens in the same pass that gives its own next token.",
        count=span.count(DRAFTS),
    )
    kept_back = Outcome(
        name="kept_back",
        label="draft kept back",
        explanation="A draft was there, but checking any of it would have cost more time than it was expected to save.",
        count=span.count(PLANNED_LEN, "0.0"),
    )
    declined = [
        Outcome(name=reason, label=label, explanation=explanation, count=span.count(DECLINED, reason))
        for reason, (label, explanation) in REASONS.items()
    ]
    named = [drafted, kept_back, *declined]
    nothing = Outcome(
        name="nothing_found",
        label="nothing to draft",
        explanation="Nothing held the request back, but there was nothing to propose: no earlier text repeats itself.",
        count=max(0.0, span.num_rounds - sum(outcome.count for outcome in named)),
    )
    return [*named, nothing]


def report(live: LiveStats, state: str) -> dict[str, Any]:
    """Return the planner's part of the dashboard's data; `state` is one of `STATES`."""
    span = live.span(WINDOW_S)
    found = outcomes(span)
    total = sum(outcome.count for outcome in found)
    return {
        "window_s": WINDOW_S,
        "summary": summary(live.span(NOW_S), state),
        "probes": span.count(PROBES),
        "outcomes": [
            {
                "name": outcome.name,
                "label": outcome.label,
                "explanation": outcome.explanation,
                "count": outcome.count,
                "share": round(outcome.count / total, 4) if total else 0.0,
            }
            for outcome in found
        ],
    }


def summary(span: Span, state: str) -> str:
    """Say in a sentence or two what is decided now."""
    if state != "on":
        return STATES[state]
    found = outcomes(span)
    total = sum(outcome.count for outcome in found)
    if span.num_rounds <= 0 or not total:
        return "Nothing is being decoded at the moment."
    verified, *others = found
    text = f"In the last {NOW_S:.0f} s, {100 * verified.count / total:.0f} % of the rounds verified a draft"
    if span.verified_len is not None and span.accepted_len is not None:
        text += f", {span.verified_len:.1f} tokens long on average; a round gave {span.accepted_len:.2f} tokens"
    main = max(others, key=lambda outcome: outcome.count)
    if main.count / total < MENTIONED_SHARE:
        return f"{text}."
    return f"{text}. Most of the others: {main.label}. {main.explanation}"
