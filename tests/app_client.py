"""The application over an engine, mostly a fake one, called without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import httpx
from fake_engine import FakeEngine

from dspark.engine.engine import Engine
from dspark.serving.app import create_app
from dspark.serving.bridge import EngineBridge


class AppClient:
    """A synchronous client of one application; the event loop runs while a call is made."""

    def __init__(self, engine: FakeEngine | Engine, **app_options: Any) -> None:
        self.engine = engine
        self.bridge = EngineBridge(engine)  # type: ignore[arg-type]
        self._loop = asyncio.new_event_loop()
        transport = httpx.ASGITransport(create_app(self.bridge, **app_options), raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)
        self.run(self._start())

    async def _start(self) -> None:
        self.bridge.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(coroutine)

    def get(self, path: str, method: str = "GET") -> httpx.Response:
        return self.run(self.http.request(method, path))

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """POST `body` as JSON; bytes are sent as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.run(self.http.post(path, content=content, **options))

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "toy", "prompt": "hi", **fields})

    def chat(self, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hi"}]
        return self.post("/v1/chat/completions", {"model": "toy", "messages": messages, **fields})

    def close(self) -> None:
        if isinstance(self.engine, FakeEngine):
            self.engine.gate.set()  # a held step would hold the shutdown
        self.run(self.bridge.shutdown(timeout_s=0))
        self.run(self.http.aclose())
        self._loop.close()
