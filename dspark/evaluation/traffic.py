"""The mixed traffic of a soak: a deck of calls that comes again and again in another order, the same for a seed.

Every pass through the deck holds the same kinds of calls, so that times of any two long stretches can be compared.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dspark.evaluation.http_call import Call

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ANSWER_TOKENS = 24  # at most, of most calls
LONG_PROMPT_CHARACTERS = 3200  # about 800 tokens; no more than half the context
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
MEASURED = ("greedy stream", "sampled stream", "seeded stream")  # kinds whose times are compared

# What each kind is, and how often it comes in a pass through the deck.
_DECK = {
    "greedy stream": 12,
    "sampled stream": 8,
    "seeded stream": 8,
    "greedy": 4,
    "penalties": 3,
    "several choices": 2,
    "stop strings": 3,
    "one token": 2,
    "long prompt": 2,
    "log-probabilities": 2,
    "token bans": 1,
    "echo": 1,
    "plain decoding": 2,
    "leaves a stream": 3,
    "leaves before the first token": 2,
    "leaves a whole answer": 1,
    "reads slowly": 1,
    "bad request": 4,
    "look": 1,
}


class Traffic:
    """Calls without end, in an order and with prompts that follow from the seed alone."""

    def __init__(self, model: str, texts: Sequence[str], *, max_model_len: int, seed: int) -> None:
        self._model = model
        self._texts = list(texts)
        self._max_model_len = max_model_len
        self._random = random.Random(seed)
        self._numbers = itertools.count(seed * 1_000_000)
        self._bad_calls = itertools.cycle(bad_calls(model))
        self._looks = itertools.cycle(["/health", "/metrics", "/v1/models", "/version"])
        self._makers: dict[str, Callable[[str], Call]] = {
            "greedy stream": lambda kind: self._chat(kind, temperature=0, **STREAM),
            "sampled stream": lambda kind: self._chat(kind, **SAMPLED, **STREAM),
            "seeded stream": lambda kind: self._completion(kind, **SAMPLED, seed=next(self._numbers), **STREAM),
            "greedy": lambda kind: self._completion(kind, temperature=0),
            "penalties": lambda kind: self._chat(kind, **SAMPLED, **PENALTIES, seed=next(self._numbers)),
            "several choices": lambda kind: self._chat(kind, n=3, seed=next(self._numbers), **SAMPLED, **STREAM),
            "stop strings": lambda kind: self._chat(kind, stop=[".", "\n", " the"], temperature=0, **STREAM),
            "one token": lambda kind: self._completion(kind, prompt=[5], max_tokens=1, temperature=0),
            "long prompt": lambda kind: self._completion(kind, prompt=self._long_prompt(), temperature=0, **STREAM),
            "log-probabilities": lambda kind: self._chat(kind, logprobs=True, top_logprobs=5, temperature=0, **STREAM),
            "token bans": lambda kind: self._completion(
                kind, logit_bias={"7": -100, "11": 3}, bad_words=["the"], min_tokens=4, **SAMPLED
            ),
            "echo": lambda kind: self._completion(kind, echo=True, temperature=0),
            "plain decoding": lambda kind: self._chat(
                kind, speculation={"num_draft_tokens": 0}, temperature=0, **STREAM
            ),
            "leaves a stream": lambda kind: self._chat(
                kind, max_tokens=200, leave_after_events=self._random.randint(1, 8), **SAMPLED, **STREAM
            ),
            "leaves before the first token": lambda kind: self._completion(
                kind, prompt=self._long_prompt(), leave_after_s=0.02, **STREAM
            ),
            "leaves a whole answer": lambda kind: self._chat(kind, max_tokens=200, leave_after_s=1.0, n=2, **SAMPLED),
            "reads slowly": lambda kind: self._chat(
                kind, logprobs=True, top_logprobs=20, read_pause_s=0.2, **SAMPLED, **STREAM
            ),
            "bad request": lambda _: next(self._bad_calls),
            "look": lambda kind: Call(kind=kind, path=next(self._looks)),
        }

    def __iter__(self) -> Iterator[Call]:
        deck = [kind for kind, count in _DECK.items() for _ in range(count)]
        while True:
            self._random.shuffle(deck)
            for kind in deck:
                yield self._makers[kind](kind)

    def _completion(self, kind: str, **fields: Any) -> Call:
        return self._call(kind, COMPLETIONS, {"prompt": self._text(), **fields})

    def _chat(self, kind: str, **fields: Any) -> Call:
        return self._call(kind, CHAT, {"messages": [{"role": "user", "content": self._text()}], **fields})

    def _call(self, kind: str, path: str, fields: dict[str, Any]) -> Call:
        behaviour = {
            name: fields.pop(name) for name in ("leave_after_events", "leave_after_s", "read_pause_s") if name in fields
        }
        body = {"model": self._model, "max_tokens": ANSWER_TOKENS, **fields}
        return Call(kind=kind, path=path, body=body, **behaviour)

    def _text(self) -> str:
        return self._random.choice(self._texts)

    def _long_prompt(self) -> str:
        """Return a long text that no other call has begun with."""
        room = min(LONG_PROMPT_CHARACTERS, self._max_model_len // 2)
        text = f"{next(self._numbers)}:"
        while len(text) < room:
            text += f" {self._text()}"
        return text[:room]


def canaries(model: str, texts: Sequence[str]) -> list[Call]:
    """Return calls whose text must always be the same: greedy or seeded, in each of the ways that a text can come."""
    greedy = {"temperature": 0}
    bodies: list[tuple[str, Mapping[str, Any]]] = [
        (CHAT, {**greedy, **STREAM}),
        (COMPLETIONS, dict(greedy)),
        (COMPLETIONS, {**SAMPLED, "seed": 1, **STREAM}),
        (CHAT, {**SAMPLED, **PENALTIES, "seed": 2}),
        (CHAT, {**SAMPLED, "top_k": 40, "seed": 3, "n": 2, **STREAM}),
        (COMPLETIONS, {"temperature": 1.2, "min_p": 0.05, "seed": 4, "stop": [".", "\n"], **STREAM}),
    ]
    calls = []
    for number, (path, fields) in enumerate(bodies):
        text = texts[number % len(texts)]
        prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
        body = {"model": model, **prompt, "max_tokens": ANSWER_TOKENS, **fields}
        calls.append(Call(kind=f"canary {number}", path=path, body=body))
    return calls


def bad_calls(model: str) -> list[Call]:
    """Return calls that a server must refuse."""
    good = {"model": model, "prompt": "hi", "max_tokens": 4}
    chat = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    bodies: list[tuple[str, Mapping[str, Any] | bytes]] = [
        (COMPLETIONS, b"{"),
        (COMPLETIONS, b"\xff\xfe"),
        (COMPLETIONS, b"[]"),
        (COMPLETIONS, {**good, "temperature": -1}),
        (COMPLETIONS, {**good, "max_tokens": 10**9}),
        (COMPLETIONS, {**good, "prompt": []}),
        (COMPLETIONS, {**good, "prompt": [10**12]}),
        (COMPLETIONS, {**good, "model": "another"}),
        (COMPLETIONS, {**good, "temprature": 1}),
        (COMPLETIONS, {**good, "n": 0, "stream": True}),
        (COMPLETIONS, {**good, "stop": [""]}),
        (CHAT, {**chat, "messages": []}),
        (CHAT, {**chat, "messages": "hi"}),
        (CHAT, {**chat, "top_logprobs": 3}),
        (CHAT, {**chat, "seed": "5", "stream": True}),
        ("/v1/nothing", good),
    ]
    return [Call(kind="bad request", path=path, body=body, is_bad=True) for path, body in bodies]
