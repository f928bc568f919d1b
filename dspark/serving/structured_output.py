"""The fields of a body that ask for an answer of some structure: `response_format` and `structured_outputs`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from dspark.errors import RequestError
from dspark.serving.chat_messages import STRICT
from dspark.structure import Structure


class _Model(BaseModel):
    model_config = STRICT


class JsonSchemaFormat(_Model):
    """`response_format.json_schema`. The schema holds whether `strict` is set or not."""

    name: str  # of no effect, as `description` and `strict`
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Model):
    """`response_format`, as the OpenAI API has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def check(self) -> None:
        """Raise `RequestError` unless there is a schema exactly where the type says so."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            is_missing = self.json_schema is None
            raise RequestError(
                f"response_format.json_schema {'is missing' if is_missing else 'is not for'} type {self.type!r}; "
                f"{'send' if is_missing else 'leave out'} the schema or choose another type",
                param="response_format.json_schema",
            )


class StructuredOutputs(_Model):
    """`structured_outputs`, as vLLM has it: exactly one of these."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")  # a schema, also as text
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark or GBNF

    @property
    def asked(self) -> list[str]:
        """The names of the fields that ask for something."""
        values: dict[str, Any] = {"json": self.json_, "json_object": self.json_object or None, "regex": self.regex}
        values |= {"choice": self.choice, "grammar": self.grammar}
        return [name for name, value in values.items() if value is not None]

    def check(self) -> None:
        """Raise `RequestError` unless one structure is asked for."""
        if len(self.asked) != 1:
            raise RequestError(
                f"structured_outputs asks for {', '.join(self.asked) or 'nothing'}; give one of json, json_object, "
                "regex, choice and grammar",
                param="structured_outputs",
            )


class StructureFields(_Model):
    """The fields themselves, for the bodies of both endpoints."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    def check(self) -> None:
        """Raise `RequestError` when these fields contradict themselves or each other."""
        if self.response_format is not None:
            self.response_format.check()
        if self.structured_outputs is None:
            return
        self.structured_outputs.check()
        if self.response_format is not None and self.response_format.type != "text":
            raise RequestError(
                "structured_outputs and response_format both ask for a structure; send one of them",
                param="structured_outputs",
            )

    def structure(self) -> Structure | None:
        """Return the structure asked for, None for plain text; after `check`. Raises `RequestError`."""
        outputs = self.structured_outputs
        if outputs is not None:
            if outputs.json_ is not None:
                return Structure.json_schema(outputs.json_)
            if outputs.regex is not None:
                return Structure.regex(outputs.regex)
            if outputs.choice is not None:
                return Structure.choice(outputs.choice)
            if outputs.grammar is not None:
                return Structure.grammar(outputs.grammar)
            return Structure.json_object()
        if self.response_format is None or self.response_format.type == "text":
            return None
        if self.response_format.json_schema is None:
            return Structure.json_object()
        return Structure.json_schema(self.response_format.json_schema.schema_)

    @property
    def structure_name(self) -> str:
        """The name of the field that asks for the structure."""
        if self.structured_outputs is not None and self.structured_outputs.asked:
            return f"structured_outputs.{self.structured_outputs.asked[0]}"
        is_schema = self.response_format is not None and self.response_format.json_schema is not None
        return "response_format.json_schema.schema" if is_schema else "response_format"
