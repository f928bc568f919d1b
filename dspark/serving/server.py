"""Runs the HTTP server of one engine until a signal ends it, without cutting answers short."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import uvicorn

from dspark.config import ChatConfig
from dspark.errors import ConfigError
from dspark.serving.app import DEFAULT_MAX_BODY_BYTES, create_app
from dspark.serving.bridge import EngineBridge

if TYPE_CHECKING:
    from dspark.engine.engine import Engine
    from dspark.engine.saved_state import SavedState

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FORCE_POLL_S = 0.05
LAST_BYTES_S = 5  # after the drain, for answers still on their way out
SAVE_INTERVAL_S = 60.0
SAVE_TIMEOUT_S = 5.0  # a step under way is waited for this long


class Served(Protocol):
    """What `run_server` serves: an engine, and where what it learns is kept (None: nowhere)."""

    @property
    def engine(self) -> Engine: ...
    @property
    def saved_state(self) -> SavedState | None: ...


def run_server(
    load: Callable[[], Served],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    shutdown_timeout_s: float = 30.0,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    admin_key: str | None = None,
    chat: ChatConfig | None = None,
    on_ready: Callable[[str], None] | None = None,
    save_interval_s: float = SAVE_INTERVAL_S,
) -> None:
    """Serve the engine that `load` makes until SIGINT or SIGTERM, then drain and return. Main thread only.

    The address is taken before the engine is loaded, so that a taken port shows at once (`ConfigError`); port 0
    takes a free one. Clients that connect meanwhile wait, and are answered when the engine is ready. While draining,
    new calls get 503, running ones have `shutdown_timeout_s` seconds to end, and what is left then ends with finish
    reason "abort". A second signal cuts that wait short, a third drops all connections. What the engine learned is
    written every `save_interval_s` and in the end. `admin_key` opens the routes under /admin, `chat` says how
    answers are read. `on_ready` gets the server's URL.
    """
    with bind_socket(host, port) as sock:
        served = load()
        bridge = EngineBridge(served.engine)
        config = uvicorn.Config(
            create_app(bridge, max_body_bytes=max_body_bytes, admin_key=admin_key, chat=chat),
            lifespan="on",
            log_config=None,  # the program that calls this decides about logging
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
        keeper = None if served.saved_state is None else _StateKeeper(bridge, served.saved_state, save_interval_s)
        _Server(config, bridge, shutdown_timeout_s, on_ready, keeper).run(sockets=[sock])


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raises `ConfigError` when the address cannot be had."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"port ({port}) must be between 0 and 65535; choose another with --port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:  # UnicodeError: a host that is no name at all
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another with --port or --host"
        ) from error
    # Accepted connections inherit it. asyncio sets it only where a socket names its protocol, which this one does not;
    # without it an event waits until the client has acknowledged the one before, up to 40 ms.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


class _StateKeeper:
    """Writes what the engine learned, now and then and once more in the end; steps do not wait for the disk."""

    def __init__(self, bridge: EngineBridge, saved_state: SavedState, interval_s: float) -> None:
        self._bridge = bridge
        self._saved_state = saved_state
        self._interval_s = interval_s
        self._is_ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write for the last time; the engine should have stopped."""
        self._is_ending.set()
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        while not self._is_ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_ending.wait(), self._interval_s)
            await self._save()

    async def _save(self) -> None:
        saved_state, engine = self._saved_state, self._bridge.engine
        try:
            state = await self._bridge.between_steps(lambda: saved_state.take(engine), timeout_s=SAVE_TIMEOUT_S)
            if state is not None:
                await asyncio.to_thread(saved_state.write, state)
        except Exception as error:  # whatever it is, answers go on
            logger.warning("what was learned could not be saved now: %r", error)


class _Server(uvicorn.Server):
    """uvicorn's server with a drain before its shutdown."""

    def __init__(
        self,
        config: uvicorn.Config,
        bridge: EngineBridge,
        shutdown_timeout_s: float,
        on_ready: Callable[[str], None] | None,
        keeper: _StateKeeper | None,
    ) -> None:
        super().__init__(config)
        self._keeper = keeper
        self._bridge = bridge
        self._shutdown_timeout_s = shutdown_timeout_s
        self._on_ready = on_ready
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        if self._keeper is not None:
            self._keeper.start()
        url = _url(sockets[0])
        logger.info("ready at %s", url)
        if self._on_ready is not None:
            self._on_ready(url)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain with the sockets open, so that clients hear 503 instead of a refused connection, then close."""
        logger.info(
            "shutting down: running requests have %g s to end; a second signal ends them", self._shutdown_timeout_s
        )
        drain = asyncio.create_task(self._bridge.shutdown(self._shutdown_timeout_s))
        while not drain.done():
            await asyncio.wait((drain,), timeout=FORCE_POLL_S)
            if self._num_signals > 1:
                await self._bridge.shutdown(timeout_s=0)
                break
        await drain
        if self._keeper is not None:
            await self._keeper.stop()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while serving. Unlike uvicorn, do not raise them again: a drained server ends well."""
        handlers = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        self.should_exit = True
        self.force_exit = self._num_signals > 2


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if sock.family == socket.AF_INET6 else f"http://{host}:{port}"
