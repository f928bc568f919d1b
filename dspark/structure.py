"""What form the text of an answer must have: a JSON schema, a regular expression, one of several texts, a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dspark.errors import RequestError

StructureKind = Literal["json_schema", "regex", "choice", "grammar"]

MAX_STRUCTURE_LEN = 2**18  # characters; compiling takes longer with them
MAX_MARKER_LEN = 256  # characters


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The form of an answer's text, from its first character on or from right behind the first `after`.

    Make it with `json_schema`, `json_object`, `regex`, `choice` or `grammar`. Whether it can be compiled the engine
    alone knows (`Engine.validate`). Raises `RequestError` naming `structure`.
    """

    kind: StructureKind
    text: str  # the schema as JSON, the expression, the texts as a JSON array, the grammar (Lark or GBNF)
    # A text that ends what comes first, as "</think>" does: up to it anything may come but the end of the answer.
    after: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(StructureKind):
            raise _error(f"the kind of a structure ({self.kind!r}) must be one of {', '.join(get_args(StructureKind))}")
        if not isinstance(self.text, str) or len(self.text) > MAX_STRUCTURE_LEN:
            raise _error(f"structure must be text of at most {MAX_STRUCTURE_LEN} characters; make it shorter")
        if self.after is not None and not 1 <= len(self.after) <= MAX_MARKER_LEN:
            raise _error(
                f"what comes before a structure must end with 1 to {MAX_MARKER_LEN} characters ({self.after!r})"
            )
        for text in (self.text, self.after or ""):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise _error("structure holds a lone surrogate, which is not valid Unicode; remove it") from None

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str, *, after: str | None = None) -> Structure:
        """Return the form of JSON that matches a schema, given as an object or as its text."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise _error(f"structure is not valid JSON: {error}; correct the schema") from None
        if not isinstance(schema, Mapping | bool):
            raise _error(f"structure must be a JSON schema, an object, not {type(schema).__name__}")
        return cls(kind="json_schema", text=_to_json(schema), after=after)

    @classmethod
    def json_object(cls, *, after: str | None = None) -> Structure:
        """Return the form of any JSON object."""
        return cls.json_schema({"type": "object"}, after=after)

    @classmethod
    def regex(cls, pattern: str, *, after: str | None = None) -> Structure:
        """Return the form of texts that a regular expression (Rust's syntax) matches as a whole."""
        return cls(kind="regex", text=pattern, after=after)

    @classmethod
    def choice(cls, texts: Sequence[str], *, after: str | None = None) -> Structure:
        """Return the form that only these texts have."""
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise _error("structure must be a choice of at least one text, none of them empty")
        return cls(kind="choice", text=_to_json(list(texts)), after=after)

    @classmethod
    def grammar(cls, text: str, *, after: str | None = None) -> Structure:
        """Return the form of texts that a grammar derives: Lark as llguidance reads it, or GBNF as llama.cpp does."""
        return cls(kind="grammar", text=text, after=after)


def _to_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(f"structure cannot be written as JSON: {error}; use JSON values") from None


def _error(message: str) -> RequestError:
    return RequestError(message, param="structure")
