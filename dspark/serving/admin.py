"""Routes for those who run the server, behind a key of their own."""

from __future__ import annotations

import json
import reprlib
import secrets

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dspark.errors import RequestError
from dspark.serving.bridge import EngineBridge

MAX_BODY_BYTES = 1024
BODY = '{"enabled": true} or {"enabled": false}, {"reset": true}, or both in one'


def admin_route(bridge: EngineBridge, key: str) -> Route:
    """Return /admin/speculation: GET tells what drafting does, POST switches it or makes it forget.

    A POST body has "enabled": true or false, or "reset": true, which forgets how confidences were corrected and by what
    the measured times are off, or both. All want `Authorization: Bearer KEY`. What is asked for holds from the engine's
    next step on; running requests go on, and what they say stays the same.
    """

    async def speculation(http: HttpRequest) -> Response:
        _check_key(http, key)
        if http.method == "POST":
            values = await _read_values(http)
            if "enabled" in values:
                bridge.switch_speculation(values["enabled"])
            if "reset" in values:
                bridge.reset_learned()
        drafting = bridge.engine.drafting
        if drafting is None:
            return JSONResponse({"drafter": None, "enabled": False, "state": "none"})
        is_on = bridge.wants_speculation
        return JSONResponse({"drafter": drafting.proposer.name, "enabled": is_on, "state": drafting.state})

    return Route("/admin/speculation", speculation, methods=["GET", "POST"])


def _check_key(http: HttpRequest, key: str) -> None:
    scheme, _, given = http.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode("latin-1"), key.encode()):
        raise RequestError("the admin key is missing or wrong; send Authorization: Bearer KEY", status=401)


async def _read_values(http: HttpRequest) -> dict[str, bool]:
    body = b""
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body has more than {MAX_BODY_BYTES} bytes; send less", status=413)
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}; send {BODY}") from error
    if not isinstance(values, dict) or not values:
        raise RequestError(f"the body is no JSON object with a value; send {BODY}")
    for name, value in values.items():
        if name not in ("enabled", "reset"):
            raise RequestError(f"{reprlib.repr(name)} is unknown; send {BODY}", param=name)
        if not isinstance(value, bool) or (name == "reset" and not value):
            raise RequestError(f"{name} has the value {reprlib.repr(value)}; send {BODY}", param=name)
    return values
