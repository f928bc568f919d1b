"""The dashboard: one self-contained page for people, and the JSON that it draws."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

import dspark
from dspark.serving.answers import to_json
from dspark.serving.bridge import EngineBridge
from dspark.serving.live_stats import BREAKER_CHANGES, FAILURES, LiveStats
from dspark.serving.planner_report import STATES, report

PAGE_PATH = "/dashboard"  # holds nothing secret: it asks for the key that its data may need
DATA_PATH = "/dashboard/data"


def dashboard_routes(bridge: EngineBridge, live: LiveStats) -> list[Route]:
    """Return the page's route and that of its data."""
    page = files("dspark.serving").joinpath("dashboard.html").read_bytes()
    headers = {
        "content-security-policy": content_security_policy(page.decode()),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }

    async def show_page(_: HttpRequest) -> Response:
        return Response(page, media_type="text/html", headers=headers)

    async def show_data(_: HttpRequest) -> Response:
        fields = dashboard_data(bridge, live)
        return Response(to_json(fields), media_type="application/json", headers={"cache-control": "no-store"})

    return [Route(PAGE_PATH, show_page), Route(DATA_PATH, show_data)]


def content_security_policy(page: str) -> str:
    """Allow the page's own script and style, by their hashes, and calls of this server; nothing else runs or loads."""
    script, style = (_hashes(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def dashboard_data(bridge: EngineBridge, live: LiveStats) -> dict[str, Any]:
    """Return what the page shows: the server, the present, the last minutes."""
    engine, drafting = bridge.engine, bridge.engine.drafting
    state = "none" if drafting is None else drafting.state
    return {
        "server": {
            "model": engine.model_name,
            "drafter": None if drafting is None else drafting.proposer.name,
            "scheduler": engine.config.speculation.scheduler,
            "verification": engine.config.speculation.verification,
            "num_draft_tokens": 0 if drafting is None else drafting.num_draft_tokens,
            "max_model_len": engine.max_model_len,
            "has_chat_template": engine.tokenizer.has_chat_template,
            "version": dspark.__version__,
            "health": bridge.health,
            "uptime_s": round(live.uptime_s, 1),
        },
        "speculation": {
            "state": state,
            "text": STATES[state],
            "failures": live.latest.value(FAILURES),
            "switched_off_by_itself": live.latest.value(BREAKER_CHANGES, "open"),
        },
        "now": live.now(),
        "latency": live.latency(),
        "acceptance": live.acceptance(),
        "planner": report(live, state),
        "prediction": live.prediction(),
        "history": live.history(),
    }


def _hashes(page: str, tag: str) -> str:
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
