"""Messages of a chat as requests bring them, and as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from dspark.serving.unsupported_fields import NEUTRAL_MESSAGE

# Of everything that bodies are made of. Strict: "5" and true are not 5. Defaults are the API's, not None, where null
# means "the default".
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(BaseModel):
    """One part of a message's content; only text is supported."""

    model_config = STRICT

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Which roles exist is the chat template's business."""

    model_config = STRICT

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_MESSAGE

    role: str
    content: str | list[TextPart]
    name: str | None = None

    def as_template_input(self) -> dict[str, Any]:
        """Return what chat templates take; text parts are joined by newlines."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        message = {"role": self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}
