"""The HTTP side: the OpenAI-compatible routes over one engine, as an ASGI application.

A call becomes one request per choice; a client that goes away takes its requests along.
"""

from __future__ import annotations

import asyncio
import contextlib
import reprlib
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import dspark
from dspark.config import ChatConfig
from dspark.errors import RequestError
from dspark.request import Request
from dspark.serving.admin import admin_route
from dspark.serving.answers import DONE_EVENT, Answer, error_fields, to_event, to_json
from dspark.serving.bridge import EngineBridge, EngineFailure, OutputStream
from dspark.serving.chat_dialect import AnswerReader, chat_dialect
from dspark.serving.dashboard import dashboard_routes
from dspark.serving.live_stats import LiveStats
from dspark.serving.protocol import (
    DEFAULT_COMPLETION_MAX_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    parse_body,
)
from dspark.structure import Structure

DEFAULT_MAX_BODY_BYTES = 8 * 2**20


def create_app(
    bridge: EngineBridge,
    *,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    admin_key: str | None = None,
    chat: ChatConfig | None = None,
) -> Starlette:
    """Return the application. Its start-up starts the bridge; its shutdown aborts what still runs.

    Without an admin key there are no routes under /admin. `chat` says how answers of chats are read.
    """
    api = _Api(bridge, max_body_bytes, chat or ChatConfig())
    routes = [] if admin_key is None else [admin_route(bridge, admin_key)]
    live = LiveStats(bridge.engine.metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        bridge.start()
        sampling = asyncio.create_task(live.run())
        yield
        sampling.cancel()
        await bridge.shutdown(timeout_s=0)

    return Starlette(
        routes=[
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{model:path}", api.model),
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/version", api.version),
            *dashboard_routes(bridge, live),
            *routes,
        ],
        exception_handlers={
            RequestError: _answer_request_error,
            HTTPException: _answer_http_error,
            EngineFailure: _answer_failure,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_failure,
        },
        lifespan=lifespan,
    )


class _Api:
    """The routes' handlers."""

    def __init__(self, bridge: EngineBridge, max_body_bytes: int, chat: ChatConfig) -> None:
        self._bridge = bridge
        self._engine = bridge.engine
        self._max_body_bytes = max_body_bytes
        self._dialect = chat_dialect(self._engine.tokenizer, chat)
        self._created = int(time.time())

    async def completions(self, http: HttpRequest) -> Response:
        return await self._generate(http, CompletionRequest)

    async def chat_completions(self, http: HttpRequest) -> Response:
        return await self._generate(http, ChatCompletionRequest)

    async def models(self, _: HttpRequest) -> Response:
        return _json({"object": "list", "data": [self._model_fields()]})

    async def model(self, http: HttpRequest) -> Response:
        self._check_model(http.path_params["model"])
        return _json(self._model_fields())

    async def health(self, _: HttpRequest) -> Response:
        health = self._bridge.health
        return _json({"status": health}, status=200 if health == "ok" else 503)

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(generate_latest(self._engine.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def version(self, _: HttpRequest) -> Response:
        return _json({"version": dspark.__version__})

    # -- generation ----------------------------------------------------------------------------------------

    async def _generate(
        self, http: HttpRequest, kind: type[CompletionRequest] | type[ChatCompletionRequest]
    ) -> Response:
        body = await self._read_body(http)
        # Long prompts take long to tokenise: other clients' streams must go on meanwhile.
        call, requests, answer = await asyncio.to_thread(self._prepare, body, kind)
        if call.stream:
            return _EventStreamResponse(self._bridge, requests, answer)
        stream = self._bridge.submit(requests)
        try:
            await _until_disconnect(http.receive, _collect(stream, answer))
        except RequestError as error:
            raise call.in_wire_names(error) from error
        finally:
            stream.close()
        return Response(answer.body(), media_type="application/json")

    async def _read_body(self, http: HttpRequest) -> bytes:
        declared = http.headers.get("content-length", "")
        num_declared = int(declared) if declared.isdecimal() else 0
        body = bytearray()
        if num_declared <= self._max_body_bytes:
            async for part in http.stream():
                body += part
                if len(body) > self._max_body_bytes:
                    break
            else:
                return bytes(body)
        raise RequestError(
            f"the body has more than {self._max_body_bytes} bytes; send less", code="request_too_large", status=413
        )

    def _prepare(
        self, body: bytes, kind: type[CompletionRequest] | type[ChatCompletionRequest]
    ) -> tuple[CompletionRequest | ChatCompletionRequest, list[Request], Answer]:
        """Turn a body into requests that the engine takes. Raises `RequestError`; runs in any thread."""
        call = parse_body(body, kind)
        self._check_model(call.model)
        is_chat = isinstance(call, ChatCompletionRequest)
        answer_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        requests: list[Request] = []
        kept_token_ids = self._dialect.kept_token_ids(call) if isinstance(call, ChatCompletionRequest) else ()
        prompts = self._prompts(call)
        bad_token_sequences = self._bad_token_sequences(call)
        for prompt_token_ids in prompts:
            structure = self._structure(call, prompt_token_ids)
            # The context end is no mistake of a client that names no limit.
            room = self._engine.max_model_len - len(prompt_token_ids)
            default_max_tokens = None if is_chat or room < 1 else min(DEFAULT_COMPLETION_MAX_TOKENS, room)
            for choice in range(call.n):
                request = Request(
                    request_id=f"{answer_id}-{len(requests)}",
                    prompt_token_ids=prompt_token_ids,
                    sampling=call.sampling_params(
                        self._engine.generation_defaults,
                        choice=choice,
                        default_max_tokens=default_max_tokens,
                        bad_token_sequences=bad_token_sequences,
                        kept_token_ids=kept_token_ids,
                        structure=structure,
                    ),
                )
                if choice == 0:  # the others differ in their seed alone
                    self._validate(request, call)
                requests.append(request)
        echoes = self._echoes(call, prompts)
        readers = self._readers(call, requests)
        answer = Answer(
            call, requests, answer_id=answer_id, tokenizer=self._engine.tokenizer, echoes=echoes, readers=readers
        )
        return call, requests, answer

    def _validate(self, request: Request, call: CompletionRequest | ChatCompletionRequest) -> None:
        try:
            self._engine.validate(request)
        except RequestError as error:
            error = call.in_wire_names(error)
            if isinstance(call, ChatCompletionRequest) and error.param == "prompt":
                error.param = "messages"  # what a chat's prompt is made of
            raise error

    def _prompts(self, call: CompletionRequest | ChatCompletionRequest) -> list[list[int]]:
        tokenizer = self._engine.tokenizer
        if isinstance(call, ChatCompletionRequest):
            self._dialect.check(call)
            messages = [message.as_template_input() for message in call.messages]
            return [
                tokenizer.render_chat(
                    messages,
                    add_generation_prompt=call.add_generation_prompt,
                    template_kwargs=self._dialect.template_variables(call),
                )
            ]
        return [prompt if isinstance(prompt, list) else tokenizer.encode(prompt) for prompt in call.prompt]

    def _structure(
        self, call: CompletionRequest | ChatCompletionRequest, prompt_token_ids: Sequence[int]
    ) -> Structure | None:
        """Return the form that the answers to a prompt must have."""
        try:
            if isinstance(call, ChatCompletionRequest):
                return self._dialect.structure(call, prompt_token_ids)
            return call.structure()
        except RequestError as error:
            raise call.in_wire_names(error) from error

    def _bad_token_sequences(self, call: CompletionRequest | ChatCompletionRequest) -> list[tuple[int, ...]]:
        """Return the tokens of each bad word, as it begins a text and as it follows a space."""
        encode = self._engine.tokenizer.encode
        spellings = [text for word in call.bad_words for text in (word, f" {word}")]
        sequences = [tuple(encode(text, add_special_tokens=False)) for text in spellings]
        return list(dict.fromkeys(sequence for sequence in sequences if sequence))

    def _echoes(self, call: CompletionRequest | ChatCompletionRequest, prompts: list[list[int]]) -> list[str]:
        """Return the prompt's text for each choice of a call that wants it back, else nothing."""
        if isinstance(call, ChatCompletionRequest) or not call.echo:
            return []
        decode = partial(self._engine.tokenizer.decode, skip_special_tokens=call.skip_special_tokens)
        texts = [
            prompt if isinstance(prompt, str) else decode(ids) for prompt, ids in zip(call.prompt, prompts, strict=True)
        ]
        return [text for text in texts for _ in range(call.n)]

    def _readers(
        self, call: CompletionRequest | ChatCompletionRequest, requests: list[Request]
    ) -> list[AnswerReader | None]:
        """Return what reads the text of each choice of a chat, else nothing."""
        if not isinstance(call, ChatCompletionRequest):
            return []
        return [self._dialect.reader(call, request.prompt_token_ids) for request in requests]

    def _check_model(self, model: str) -> None:
        if model != self._engine.model_name:
            raise RequestError(
                f"the model {reprlib.repr(model)} does not exist; this server has {self._engine.model_name!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def _model_fields(self) -> dict[str, Any]:
        return {
            "id": self._engine.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "dspark",
            "max_model_len": self._engine.max_model_len,
        }


class _EventStreamResponse(Response):
    """Server-sent events of one call.

    Starlette's own streaming response notices a lost client only when it sends, under newer ASGI versions: a
    request that waits or prefills would go on for nobody.
    """

    media_type = "text/event-stream"

    def __init__(self, bridge: EngineBridge, requests: list[Request], answer: Answer) -> None:
        self.status_code = 200
        self.background = None
        # Proxies must pass events on as they come.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._stream = bridge.submit(requests)
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_disconnect(receive, self._send_all(send))
        except ClientDisconnect:
            return  # nobody is left to be told
        finally:
            self._stream.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in _events(self._stream, self._answer):
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(stream: OutputStream, answer: Answer) -> AsyncIterator[bytes]:
    try:
        async for output in stream:
            for event in answer.events(output):
                yield event
    except (EngineFailure, RequestError) as failure:  # the status was sent long ago
        yield to_event(answer.error_fields(failure))
        yield DONE_EVENT
        return
    for event in answer.last_events():
        yield event


async def _collect(stream: OutputStream, answer: Answer) -> None:
    async for output in stream:
        answer.add(output)


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, cancelling it with `ClientDisconnect` when the client goes away."""
    work_task = asyncio.create_task(work)
    watch_task = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((work_task, watch_task), return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnect
        work_task.result()
    finally:
        for task in (work_task, watch_task):
            task.cancel()
        await asyncio.gather(work_task, watch_task, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- errors ------------------------------------------------------------------------------------------------


def _json(fields: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(fields), status_code=status, headers=headers, media_type="application/json")


async def _answer_request_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    fields = error_fields(str(error), status=error.status, param=error.param, code=error.code)
    return _json(fields, status=error.status)


async def _answer_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404:
        message = f"there is no {http.url.path} here; generation is at /v1/completions and /v1/chat/completions"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{http.method} is not allowed for {http.url.path}; use {allowed}"
    return _json(error_fields(message, status=error.status_code), status=error.status_code, headers=error.headers)


async def _answer_nobody(_: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # as nginx logs a client that left


async def _answer_failure(_: HttpRequest, error: Exception) -> Response:
    message = str(error) if isinstance(error, EngineFailure) else "the server failed; its log says more"
    return _json(error_fields(message, status=500), status=500)
