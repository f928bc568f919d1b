"""Engines over the tiny target that speak bytes, one for each kind of drafter, and a server of one on a real port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from byte_tokenizers import ToyTokenizer, byte_level_backend
from drafter_cases import PAGE_SIZE
from dspark_bench import RecordingProposer, engine_over, stored_drafter

from dspark.engine.engine import Engine
from dspark.models.tokenizer import GenerationDefaults
from dspark.serving.app import create_app
from dspark.serving.bridge import EngineBridge
from dspark.serving.server import bind_socket
from dspark.speculation.combined import CombinedProposer
from dspark.speculation.dspark_drafter import DSparkProposer
from dspark.speculation.ngram import NgramProposer
from dspark.speculation.proposal import Draft, DraftContext, Proposer

KINDS = ("plain", "ngram", "dspark")
NUM_PAGES = 256


class ByteTokenizer(ToyTokenizer):
    """Ids are bytes; a chat is its messages as text, for the tiny target has no room for special tokens."""

    def __init__(self, *, bos_token_id: int | None = None) -> None:
        super().__init__(byte_level_backend(), bos_token_id=bos_token_id)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Render as `role:content` lines; the template's one variable is `closing`, the last line's beginning."""
        closing = (template_kwargs or {}).get("closing", "assistant:") if add_generation_prompt else ""
        lines = [f"{message['role']}:{message['content']}\n" for message in messages]
        return self.encode("".join(lines) + closing, add_special_tokens=False)


class KnownTexts:
    """Makes drafts right for some tokens and wrong after, in turn: none of the tiny drafter's own would be right.

    `add` what will come out, prompt included; drafts of other texts stay as they are.
    """

    def __init__(self) -> None:
        self._texts: list[list[int]] = []
        self._num_rounds = 0

    def add(self, token_ids: Sequence[int]) -> None:
        self._texts.append(list(token_ids))

    def __call__(self, context: DraftContext, draft: Draft) -> Draft:
        text = list(context.token_ids)
        known = next((t for t in self._texts if t[: len(text)] == text and len(t) > len(text)), None)
        if known is None or not draft.token_ids:
            return draft
        self._num_rounds += 1
        num_right = self._num_rounds % (len(draft.token_ids) + 1)
        right = known[len(text) : len(text) + num_right]
        return Draft(token_ids=[*right, *draft.token_ids[len(right) :]])


def byte_engine(
    kind: str,
    *,
    known: Callable[[DraftContext, Draft], Draft] | None = None,
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    **sampling_defaults: Any,
) -> Engine:
    """Return an engine with the drafter of a `kind`; `known` may replace a DSpark drafter's drafts."""
    proposers: dict[str, Callable[[], Proposer | None]] = {
        "plain": lambda: None,
        "ngram": NgramProposer,
        "dspark": lambda: RecordingProposer(stored_drafter("deepspec_gated"), num_pages=NUM_PAGES, correct=known),
        "dspark+ngram": lambda: CombinedProposer(
            DSparkProposer(stored_drafter("deepspec_gated"), num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        ),
    }
    engine = engine_over(proposers[kind](), num_pages=NUM_PAGES)
    engine.tokenizer = ByteTokenizer(bos_token_id=bos_token_id)  # type: ignore[assignment]
    engine.generation_defaults = GenerationDefaults(eos_token_ids=frozenset(eos_token_ids), **sampling_defaults)
    return engine


@contextmanager
def live_server(engine: Any, *, wrap: Callable[[Any], Any] = lambda app: app, **app_options: Any) -> Iterator[str]:
    """Serve an engine on a free port in a thread; yields the URL. `wrap` puts something around the application."""
    bridge = EngineBridge(engine)
    with bind_socket("127.0.0.1", 0) as sock:
        app = wrap(create_app(bridge, **app_options))
        config = uvicorn.Config(app, lifespan="on", log_config=None, access_log=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            deadline = time.monotonic() + 20
            while not server.started:
                assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
                time.sleep(0.005)
            host, port = sock.getsockname()[:2]
            yield f"http://{host}:{port}"
        finally:
            server.should_exit = True
            thread.join(20)
