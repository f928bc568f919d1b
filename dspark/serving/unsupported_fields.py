"""Fields of the OpenAI API and its extensions that are not supported; they pass with values that ask for nothing."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from dspark.errors import RequestError

# Values that ask for nothing, by unsupported field.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "truncate_prompt_tokens": (None,),
    "spaces_between_special_tokens": (None, True),
    "guided_json": (None,),  # the older names of what `structured_outputs` holds
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "priority": (None, 0),
    "store": (None, False),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
}
NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "best_of": (None, 1),
    "suffix": (None, ""),
}
NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    **_NEUTRAL,
    "echo": (None, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "continue_final_message": (None, False),
    "chat_template": (None,),
    "documents": (None, []),
    "moderation": (None,),
    "prompt_cache_key": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "safety_identifier": (None,),
}

# What clients send back when they repeat an assistant's message.
NEUTRAL_MESSAGE: dict[str, tuple[Any, ...]] = {
    "function_call": (None,),
    "refusal": (None,),
    "audio": (None,),
    "annotations": (None, []),
}


def drop_neutral(fields: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], prefix: str = "") -> None:
    """Take unsupported fields out of `fields`, or raise `RequestError` when one asks for something."""
    for name in [name for name in fields if name in neutral]:
        value = fields.pop(name)
        # A bool equals 0 or 1 in Python, but not in JSON.
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral[name]):
            raise RequestError(
                f"{prefix}{name} ({reprlib.repr(value)}) is not supported; leave it out", param=f"{prefix}{name}"
            )
