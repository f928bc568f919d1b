"""The Python front door: `LLM(...).generate(prompts, SamplingParams(...))` and `.chat(messages, ...)`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dspark.config import (
    DEFAULT_MODEL,
    BatchingConfig,
    CacheConfig,
    EngineConfig,
    SpeculationConfig,
)
from dspark.engine.build import load_engine
from dspark.engine.engine import Engine
from dspark.errors import RequestError
from dspark.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
    TokenOrigin,
)

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The finished answer to one prompt."""

    prompt: str | None  # None when token ids were given
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    error: str | None = None  # with FinishReason.ERROR: why this prompt could not be finished
    stop_reason: int | str | None  # the stop token id or stop string that ended it
    num_cached_tokens: int  # prompt tokens whose KV was reused
    speculation: SpeculationStats
    token_origins: list[TokenOrigin]  # of `token_ids`: drafted and accepted, corrected, bonus or plain
    logprobs: list[TokenLogprobs] | None = None  # of `token_ids`, where the request asks for them
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # of `prompt_token_ids`, None for the first
    ttft_s: float  # from the call of `generate` to the first token, waiting included
    latency_s: float  # to the last token


class LLM:
    """A model with its engine, driven by the calling thread.

    `drafter` is "auto" (the drafter that ships for the model together with n-gram, else n-gram), "none", "ngram",
    "dspark" (the shipped one alone), a DSpark drafter of the model or a smaller model of the same vocabulary; "+ngram"
    after the last three adds n-gram. Raises `ConfigError` or `CheckpointError` when the model cannot be used as asked.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        drafter: str = EngineConfig.drafter,
        dtype: str = EngineConfig.dtype,
        device: str = EngineConfig.device,
        num_threads: int | None = None,
        max_model_len: int | None = None,
        speculation: SpeculationConfig | None = None,
        batching: BatchingConfig | None = None,
        cache: CacheConfig | None = None,
    ) -> None:
        config = EngineConfig(
            model=model,
            drafter=drafter,
            dtype=dtype,
            device=device,
            num_threads=num_threads,
            max_model_len=max_model_len,
            speculation=speculation or SpeculationConfig(),
            batching=batching or BatchingConfig(),
            cache=cache or CacheConfig(),
        )
        self._init_from_engine(load_engine(config))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Wrap an engine that exists already."""
        llm = cls.__new__(cls)
        llm._init_from_engine(engine)
        return llm

    def _init_from_engine(self, engine: Engine) -> None:
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[Completion]:
        """Continue each prompt and return the completions in order.

        A prompt is raw text (special tokens in it are parsed) or a list of token ids. One `SamplingParams`
        serves all prompts, or give one for each; without any, the model's recommendations apply. Raises
        `RequestError` before anything runs when any prompt cannot be served. Ctrl-C ends all of them and leaves the
        engine usable.
        """
        texts = _as_prompt_list(prompts)
        requests = [
            Request(
                request_id=f"llm-{next(self._request_ids)}",
                prompt_token_ids=self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt),
                sampling=params,
            )
            for prompt, params in zip(texts, self._params_for(texts, sampling_params), strict=True)
        ]
        for request in requests:
            self.engine.validate(request)
        return self._run(requests, [p if isinstance(p, str) else None for p in texts], show_progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        show_progress: bool = True,
    ) -> list[Completion]:
        """Answer one conversation or several, rendered with the model's chat template."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [
            self.tokenizer.render_chat(conversation, template_kwargs=template_kwargs)  # type: ignore[arg-type]
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, show_progress=show_progress)

    def default_sampling_params(self) -> SamplingParams:
        """Return what the model recommends for sampling, and our own defaults for the rest."""
        return SamplingParams(**self.engine.generation_defaults.sampling_values())

    def _params_for(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"{len(sampling_params)} sampling_params for {len(prompts)} prompts; give one, or one for each",
                param="sampling_params",
            )
        return list(sampling_params)

    def _run(self, requests: list[Request], prompts: list[str | None], show_progress: bool) -> list[Completion]:
        start = time.monotonic()
        gathered = {r.request_id: _Gathered(request=r, prompt=p) for r, p in zip(requests, prompts, strict=True)}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        try:
            with Progress(*columns, disable=not show_progress, transient=True) as progress:
                task = progress.add_task("Generating", total=len(requests))
                for request in requests:
                    self.engine.add_request(request)
                num_tokens = 0
                while self.engine.has_unfinished():
                    for output in self.engine.step():
                        gathered[output.request_id].add(output, time.monotonic() - start)
                        num_tokens += len(output.token_ids)
                        progress.advance(task, output.finish_reason is not None)
                    rate = num_tokens / (time.monotonic() - start)
                    progress.update(task, description=f"Generating ({rate:.0f} tokens/s)")
        finally:  # also after Ctrl-C: nothing of this call stays in the engine
            for request in requests:
                self.engine.abort(request.request_id)
            while self.engine.has_unfinished():
                self.engine.step()
        return [g.completion() for g in gathered.values()]


@dataclass(kw_only=True)
class _Gathered:
    """The outputs of one request so far."""

    request: Request
    prompt: str | None
    text: str = ""
    token_ids: list[int] | None = None
    token_origins: list[TokenOrigin] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    last: RequestOutput | None = None
    ttft_s: float = 0.0
    latency_s: float = 0.0

    def add(self, output: RequestOutput, elapsed_s: float) -> None:
        if self.token_ids is None:
            self.token_ids, self.ttft_s = [], elapsed_s
        self.text += output.text
        self.token_ids += output.token_ids
        self.token_origins += output.token_origins
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.last, self.latency_s = output, elapsed_s

    def completion(self) -> Completion:
        last = self.last
        assert last is not None, self.request.request_id
        assert last.finish_reason is not None, last
        return Completion(
            prompt=self.prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            text=self.text,
            token_ids=self.token_ids or [],
            token_origins=self.token_origins,
            finish_reason=last.finish_reason,
            error=last.error,
            stop_reason=last.stop_reason,
            num_cached_tokens=last.num_cached_tokens,
            speculation=last.speculation,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            ttft_s=self.ttft_s,
            latency_s=self.latency_s,
        )


def _as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
