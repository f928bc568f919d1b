"""Fixtures: applications over fake engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from app_client import AppClient
from fake_engine import FakeEngine


@pytest.fixture
def open_app() -> Iterator[Callable[..., AppClient]]:
    """Return a function that opens an application over an engine; all are closed after the test."""
    clients: list[AppClient] = []

    def open_client(engine: FakeEngine | None = None, **app_options: Any) -> AppClient:
        clients.append(AppClient(engine or FakeEngine(), **app_options))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


@pytest.fixture
def app(open_app: Callable[..., AppClient]) -> AppClient:
    return open_app()
