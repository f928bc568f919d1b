"""An engine without a model: scripted token streams, cut into blocks, through the real output code."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from byte_tokenizers import EOS_ID, VOCAB_SIZE, ToyTokenizer, byte_level_tokenizer

from dspark.config import EngineConfig
from dspark.engine.output import OutputProcessor
from dspark.errors import RequestError
from dspark.metrics import EngineMetrics
from dspark.request import FinishReason, Request, RequestOutput

Script = Callable[[Request], Iterable[int]]


def says(text: str) -> Script:
    """Return a script in which every request is answered with `text` and the end."""
    return lambda request: [*text.encode(), EOS_ID]


def counts_forever(request: Request) -> Iterator[int]:
    """A script without an end: abc...z over and over."""
    return itertools.cycle(b"abcdefghijklmnopqrstuvwxyz")


class FakeEngine:
    """Has the interface the bridge and the app use. Steps wait for `gate`, which is open unless a test closes it."""

    def __init__(
        self,
        script: Script = counts_forever,
        *,
        block_len: int = 3,
        max_model_len: int = 64,
        tokenizer: ToyTokenizer | None = None,
        step_s: float = 0.0,
        defaults: dict[str, Any] | None = None,
    ) -> None:
        self.model_name = "toy"
        self.wait_s = 0.0
        self.drafting: Any = None
        self.config = EngineConfig(model=self.model_name)
        self.max_model_len = max_model_len
        self.vocab_size = VOCAB_SIZE
        self.tokenizer = tokenizer or byte_level_tokenizer()
        self.metrics = EngineMetrics(self.model_name)
        unset = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "repetition_penalty"))
        self.generation_defaults = SimpleNamespace(**{"eos_token_ids": frozenset({EOS_ID})} | unset | (defaults or {}))
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        self.num_failing_steps = 0  # as many steps raise from now on
        self.block_lens: Iterator[int] = itertools.repeat(block_len)
        self.seen: list[Request] = []
        self.aborted_ids: list[str] = []
        self.threads: set[int] = set()
        self._script = script
        self._step_s = step_s
        self._running: dict[str, tuple[Request, Iterator[int], OutputProcessor]] = {}
        self._pending: list[RequestOutput] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    def validate(self, request: Request) -> None:
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            raise RequestError("prompt is empty; give at least one token", param="prompt")
        if num_tokens >= self.max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, the context holds {self.max_model_len}; shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        if any(not 0 <= i < self.vocab_size for i in request.prompt_token_ids):
            raise RequestError("prompt holds an id outside the vocabulary", param="prompt")
        max_tokens = request.sampling.max_tokens
        if max_tokens is not None and num_tokens + max_tokens > self.max_model_len:
            raise RequestError(
                f"max_tokens ({max_tokens}) exceeds what the context leaves; lower it",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def add_request(self, request: Request) -> None:
        self.validate(request)
        self.threads.add(threading.get_ident())
        self.seen.append(request)
        output = OutputProcessor(
            self.tokenizer,
            request.sampling,
            eos_token_ids=self.generation_defaults.eos_token_ids,
            max_output_tokens=request.sampling.max_tokens or self.max_model_len - len(request.prompt_token_ids),
        )
        self._running[request.request_id] = (request, iter(self._script(request)), output)

    def abort(self, request_id: str) -> None:
        self.threads.add(threading.get_ident())
        if request_id in self._running:
            request, _, output = self._running.pop(request_id)
            self.aborted_ids.append(request_id)
            self._pending.append(self._output(request, output, text=output.flush(), finish_reason=FinishReason.ABORT))

    def has_unfinished(self) -> bool:
        return bool(self._running or self._pending)

    def step(self) -> list[RequestOutput]:
        self.threads.add(threading.get_ident())
        self.num_steps += 1
        assert self.gate.wait(timeout=20), "the test forgot to open the gate"
        time.sleep(self._step_s)
        if self.num_failing_steps:
            self.num_failing_steps -= 1
            raise RuntimeError("the scripted fault")
        self.metrics.num_running.set(len(self._running))
        block_len = next(self.block_lens)
        for request_id, (request, tokens, output) in list(self._running.items()):
            token_ids = list(itertools.islice(tokens, block_len))
            appended = output.append(token_ids)
            self._pending.append(
                self._output(
                    request,
                    output,
                    text=appended.text,
                    token_ids=token_ids[: appended.num_kept],
                    finish_reason=appended.finish_reason,
                    stop_reason=appended.stop_reason,
                )
            )
            if appended.finish_reason is not None:
                del self._running[request_id]
        outputs, self._pending = self._pending, []
        return outputs

    def _output(self, request: Request, output: OutputProcessor, **fields: Any) -> RequestOutput:
        return RequestOutput(
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=len(request.prompt_token_ids) // 4 * 4,
            num_output_tokens=output.num_tokens,
            **fields,
        )
