"""The dashboard in a real browser: figures arrive, hostile answers stay text, the key is asked for and sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from byte_engines import live_server
from fake_engine import FakeEngine
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from toys import cycle_rule, make_engine, right_until_proposer
from web_driver import BROWSER, DRIVER, Page, headless_page

from dspark.engine.engine import Engine

pytestmark = pytest.mark.skipif(
    DRIVER is None or BROWSER is None, reason="needs chromedriver and Chromium, which are not installed"
)

WORDS = ["<script>window.hit = 1</script>", "<img src=x onerror='window.hit = 1'>", "&lt;b&gt; ", "javascript:hit()"]
RULE = cycle_rule(4, 4)


class AsksForKey:
    """Lets nothing but the page through without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", [])).get(b"authorization", b"").decode()
        if scope["type"] != "http" or scope["path"] == "/dashboard" or given == f"Bearer {self._key}":
            await self._app(scope, receive, send)
        else:
            await JSONResponse({"error": {"message": "wrong key"}}, status_code=401)(scope, receive, send)


def hostile_engine() -> Engine:
    """Return an engine whose model says `WORDS` over and over."""
    return make_engine(RULE, 4, words=WORDS, proposer=right_until_proposer(RULE, 4, 1), num_draft_tokens=2)


def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with headless_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


def generate(page: Page, **fields: str) -> None:
    """Fill in the playground, start it, and wait for the end."""
    for name, value in fields.items():
        page.run("document.getElementById(arguments[0]).value = arguments[1]", name.replace("_", "-"), value)
    page.run("document.getElementById('go').click()")
    page.until("return document.getElementById('stop').disabled && document.getElementById('answer').childElementCount")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_hostile_answer_stays_text_and_each_token_has_its_origin(page: Page, is_streamed: bool) -> None:
    with live_server(hostile_engine()) as url:
        page.open(f"{url}/dashboard")
        page.until("return document.getElementById('health').textContent === 'ok'")
        page.run("document.getElementById('stream').checked = arguments[0]", is_streamed)
        generate(page, max_tokens="7")
        tokens = page.run(
            "return [...document.querySelectorAll('#answer .token')].map((t) => [t.className, t.textContent])"
        )
        assert tokens == [
            ["token plain", WORDS[1]],
            ["token accepted", WORDS[2]],
            ["token corrected", WORDS[3]],
            ["token accepted", WORDS[0]],
            ["token corrected", WORDS[1]],
            ["token accepted", WORDS[2]],
            ["token bonus", WORDS[3]],
        ]
        assert page.run("return [window.hit ?? null, document.querySelectorAll('#answer :not(.token)').length]") == [
            None,
            0,
        ]
        page.until("return document.querySelector('#tiles .value').textContent !== '\\u2013'")
        assert page.complaints() == []


def test_the_stop_button_ends_the_answer_and_its_request(page: Page) -> None:
    engine = FakeEngine(step_s=0.02, max_model_len=100_000)
    with live_server(engine) as url:
        page.open(f"{url}/dashboard")
        page.until("return !document.getElementById('go').disabled")
        page.run("document.getElementById('max-tokens').value = 90000; document.getElementById('go').click()")
        page.until("return document.querySelectorAll('#tiles .value')[4].textContent === '1'")
        page.run("document.getElementById('stop').click()")
        page.until("return document.getElementById('figures').textContent.startsWith('stopped by you')")
        until(lambda: len(engine.aborted_ids) == 1)
        assert page.run(
            "return [document.getElementById('go').disabled, document.getElementById('stop').disabled]"
        ) == [
            False,
            True,
        ]


def test_a_mistake_is_told_in_the_servers_words(page: Page) -> None:
    with live_server(hostile_engine()) as url:
        page.open(f"{url}/dashboard")
        page.until("return !document.getElementById('go').disabled")
        generate(page, max_tokens="0")
        assert page.run("return document.getElementById('answer').textContent").startswith("max_tokens (0) must be")


def test_the_key_is_asked_for_kept_in_the_tab_and_sent_with_data_and_playground(page: Page) -> None:
    with live_server(hostile_engine(), wrap=partial(AsksForKey, key="s3cret")) as url:
        page.open(f"{url}/dashboard")
        page.until("return !document.getElementById('key-panel').hidden")
        for key in ("wrong", "s3cret"):
            page.run("document.getElementById('key').value = arguments[0]", key)
            page.run("document.querySelector('#key-panel button').click()")
            if key == "wrong":
                page.until("return document.getElementById('key-error').textContent === 'This key was refused.'")
        page.until("return document.getElementById('health').textContent === 'ok'")
        assert page.run("return document.getElementById('key-panel').hidden")
        generate(page, max_tokens="3")
        assert page.run("return document.querySelectorAll('#answer .token').length") == 3
        stored = page.run(
            "return [Object.values({...sessionStorage}), Object.values({...localStorage}), document.cookie]"
        )
        assert stored == [["s3cret"], [], ""]
