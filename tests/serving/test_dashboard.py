"""The dashboard's page and data: self-contained, safe against what models say, and each of the other's fields used."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from toys import hashed_rule, make_engine, right_until_proposer

from dspark.serving.app import create_app
from dspark.serving.bridge import EngineBridge
from dspark.serving.dashboard import content_security_policy, dashboard_data
from dspark.serving.live_stats import LiveStats

RULE = hashed_rule(16)
PAGE = files("dspark.serving").joinpath("dashboard.html").read_text()
SCRIPT = re.findall(r"<script>(.*?)</script>", PAGE, re.DOTALL)
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node, which is not installed")


class TagReader(HTMLParser):
    """Checks that elements are closed in order, and collects attributes."""

    VOID = frozenset({"meta", "link", "input", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def toy_engine(**options: Any) -> Any:
    return make_engine(RULE, 16, proposer=right_until_proposer(RULE, 16, 2), **options)


def run_script(data: list[Any], parts: list[Any]) -> dict[str, Any]:
    """Return what the page's script does with the data and with an answer of the playground."""
    runner = Path(__file__).with_name("dashboard_page.mjs")
    text = json.dumps({"page": PAGE, "data": data, "parts": parts})
    done = subprocess.run(["node", runner], input=text, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def busy_data(app: Any) -> Any:
    """Return the data after an answer, with something in each list and no unknown figure."""
    live = LiveStats(app.engine.metrics)
    live.sample()
    app.complete(prompt=[1, 2], temperature=0, max_tokens=30)
    app.engine.metrics.observe_prediction(0.04, 0.05)
    live.sample()
    return json.loads(json.dumps(dashboard_data(app.bridge, live)))


def paths(value: Any, path: str = "data") -> set[str]:
    """Return the places of all fields, list items as one."""
    if isinstance(value, dict):
        return {f"{path}.{name}" for name in value} | {p for n, v in value.items() for p in paths(v, f"{path}.{n}")}
    if isinstance(value, list):
        return {p for item in value for p in paths(item, f"{path}[]")}
    return set()


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_html_whose_elements_are_closed_and_whose_script_is_inline() -> None:
    reader = TagReader()
    reader.feed(PAGE)
    assert reader.open == []
    assert len(SCRIPT) == PAGE.count("<script") == 1
    assert not [a for a in reader.attributes if a[1].startswith("on") or a[1] in ("src", "style", "action")]


def test_the_page_loads_nothing_from_elsewhere() -> None:
    """The only address in it is the name of SVG's namespace, which is never fetched."""
    assert re.findall(r"[a-z]+://[^\"'`\s)]+", PAGE) == ["http://www.w3.org/2000/svg"]
    assert re.findall(r"<link[^>]*>", PAGE) == ['<link rel="icon" href="data:,">']
    assert not re.findall(r"url\(|@import|import\(", PAGE)
    assert set(re.findall(r'"(/[a-z/]+[a-z0-9_/]*)"', SCRIPT[0])) == {
        *("/dashboard/data", "/v1/chat/completions", "/v1/completions")
    }


@pytest.mark.parametrize(
    "sink", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("]
)
def test_no_text_becomes_html_or_code(sink: str) -> None:
    assert sink not in PAGE


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else(app: Any) -> None:
    """The hashes are those of a page whose script is `1` and whose style is `a{}`."""
    response = app.get("/dashboard")
    assert (response.status_code, response.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert response.text == PAGE
    assert response.headers["content-security-policy"] == content_security_policy(PAGE)
    assert content_security_policy("<style>a{}</style><script>1</script>") == (
        "default-src 'none'; script-src 'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='; "
        "style-src 'sha256-X1RutGBrXCt9KkSaXMK7tHftWiRscFHOhxsS8tv8hBk='; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


# -- the data --------------------------------------------------------------------------------------------------------


def test_the_data_says_what_is_served(open_app: Callable[..., Any]) -> None:
    server = open_app(toy_engine()).get("/dashboard/data").json()["server"]
    assert server.pop("uptime_s") >= 0
    assert server.pop("version")
    assert server == {
        "model": "toy",
        "drafter": "function",
        "scheduler": "auto",
        "verification": "rejection",
        "num_draft_tokens": 5,
        "max_model_len": 128,
        "has_chat_template": False,
        "health": "ok",
    }


def test_the_data_says_whether_it_drafts_and_why_not(open_app: Callable[..., Any]) -> None:
    app = open_app(toy_engine())
    assert app.get("/dashboard/data").json()["speculation"]["state"] == "on"
    app.engine.switch_speculation(False)
    speculation = app.get("/dashboard/data").json()["speculation"]
    assert speculation == {
        "state": "switched_off",
        "text": "Speculation was switched off by an administrator: every token is decoded plainly.",
        "failures": 0,
        "switched_off_by_itself": 0,
    }


def test_without_a_drafter_there_is_nothing_to_plan(app: Any) -> None:
    data = app.get("/dashboard/data").json()
    assert (data["server"]["drafter"], data["speculation"]["state"]) == (None, "none")
    assert data["planner"]["summary"] == "This server has no drafter: every token is decoded plainly."


def test_a_running_server_samples_by_itself_and_stops_with_the_application() -> None:
    engine = FakeEngine()

    async def history_len() -> int:
        app = create_app(EngineBridge(engine))  # type: ignore[arg-type]
        async with app.router.lifespan_context(app):
            await asyncio.sleep(0.01)
            names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
            return names.count("LiveStats.run")

    assert asyncio.run(history_len()) == 1


# -- the page over the data ------------------------------------------------------------------------------------------


@needs_node
def test_the_page_reads_only_fields_that_the_data_has_and_all_of_them(open_app: Callable[..., Any]) -> None:
    app = open_app(toy_engine())
    data = busy_data(app)
    fresh = open_app(FakeEngine()).get("/dashboard/data").json()
    failed = {**data, "speculation": {**data["speculation"], "state": "open", "failures": 3}}
    done = run_script([fresh, failed, data], [])
    assert {"data.acceptance.positions[].rate", "data.history.kv_usage"} <= paths(data) <= set(done["read"])
    assert done["texts"]["model"] == "toy"
    assert done["texts"]["state"] == "speculation on"
    assert "Accepted42 %" in done["texts"]["tiles"]
    assert sum(line.startswith("M") for line in done["lines"]) == 13


def part(text: str, kind: str, proposer: str | None) -> dict[str, Any]:
    logprobs = {"content": [{"bytes": list(text.encode()), "logprob": -0.5, "token": text}]}
    origins = [{"kind": kind, "proposer": proposer}]
    return {"choices": [{"finish_reason": None, "logprobs": logprobs, "token_origins": origins, "token_ids": [7]}]}


@needs_node
def test_what_a_model_says_is_shown_as_text_in_the_colour_of_its_origin() -> None:
    parts = [part("Hi ", "plain", None), part(HOSTILE, "accepted", "ngram"), part("\n", "bonus", "ngram")]
    done = run_script([], parts)
    assert done["tokens"] == [
        ["token plain", "Hi ", "token 1, id 7\nplain: no draft was verified\nlog-probability -0.500 (60.7 %)"],
        [
            "token accepted ngram",
            HOSTILE,
            "token 2, id 7\ndrafted and accepted (ngram)\nlog-probability -0.500 (60.7 %)",
        ],
        [
            "token bonus ngram line-end",
            "\n",
            "token 3, id 7\nbonus: the target's own, after a whole accepted draft (ngram)\n"
            "log-probability -0.500 (60.7 %)",
        ],
    ]


@needs_node
def test_a_character_of_several_tokens_is_shown_with_the_last_of_them() -> None:
    whole = "😀".encode()
    pieces = []
    for byte in whole:
        piece = part("", "plain", None)
        piece["choices"][0]["logprobs"]["content"][0]["bytes"] = [byte]
        pieces.append(piece)
    texts = [text for _, text, _ in run_script([], pieces)["tokens"]]
    assert texts == ["", "", "", "😀"]
    completion = part("", "plain", None)
    names = [f"bytes:\\x{byte:02x}" for byte in whole[:3]] + ["bytes:\\x80!"]
    completion["choices"][0] |= {
        "logprobs": {"tokens": names, "token_logprobs": [-1.0] * 4},
        "token_origins": [{"kind": "plain", "proposer": None}] * 4,
        "token_ids": [1, 2, 3, 4],
    }
    texts = [text for _, text, _ in run_script([], [completion])["tokens"]]
    assert texts == ["", "", "", "�bytes:\\x80!"]
