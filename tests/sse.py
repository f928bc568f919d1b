"""Reading server-sent events of the OpenAI API."""

from __future__ import annotations

import json
from typing import Any


def events(body: str) -> list[dict[str, Any]]:
    """Return the events of a complete stream, checked to end with [DONE]."""
    parts = body.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]
