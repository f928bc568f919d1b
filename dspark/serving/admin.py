"""Routes for those who run the server, behind a key of their own."""

from __future__ import annotations

import json
import secrets

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dspark.errors import RequestError
from dspark.serving.bridge import EngineBridge

MAX_BODY_BYTES = 1024


def admin_route(bridge: EngineBridge, key: str) -> Route:
    """Return /admin/speculation: GET tells what drafting does, POST {"enabled": true|false} switches it.

    Both want `Authorization: Bearer KEY`. Running requests go on, and what they say stays the same.
    """

    async def speculation(http: HttpRequest) -> Response:
        _check_key(http, key)
        if http.method == "POST":
            bridge.switch_speculation(await _read_enabled(http))
        drafting = bridge.engine.drafting
        if drafting is None:
            return JSONResponse({"drafter": None, "enabled": False, "state": "none"})
        is_on = bridge.wants_speculation
        return JSONResponse({"drafter": drafting.proposer.name, "enabled": is_on, "state": drafting.state})

    return Route("/admin/speculation", speculation, methods=["GET", "POST"])


def _check_key(http: HttpRequest, key: str) -> None:
    scheme, _, given = http.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secrets.compare_digest(given.strip().encode(), key.encode()):
        raise RequestError("the admin key is missing or wrong; send Authorization: Bearer KEY", status=401)


async def _read_enabled(http: HttpRequest) -> bool:
    body = b""
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body has more than {MAX_BODY_BYTES} bytes; send less", status=413)
    try:
        values = json.loads(body)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}", param=None) from error
    if not isinstance(values, dict) or set(values) != {"enabled"} or not isinstance(values["enabled"], bool):
        raise RequestError('the body must be {"enabled": true} or {"enabled": false}', param="enabled")
    return values["enabled"]
