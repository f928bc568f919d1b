"""Which format of calls a chat template teaches."""

from __future__ import annotations

import pytest

from dspark.config import TOOL_CALL_FORMATS
from dspark.serving.tool_formats import TOOL_FORMATS, detect_tool_format


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (r"<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>", "hermes"),
        ("{{ '<tool_call>\n{\"name\": \"' + call.name + '\"}\n</tool_call>' }}", "hermes"),
        ('respond in the format {"name": function name, "parameters": dictionary of its values}.', "llama3_json"),
        (r"{\"name\": function name, \"parameters\": dictionary of its values}", "llama3_json"),
        ("{{ '[TOOL_CALLS] [' }}{{ call.function|tojson }}]", "mistral"),
        ("{{ '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments|tojson }}", "mistral_args"),
        ("<tool_call>\n<function=' + name + '>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", None),
        ("<tool_call>name\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", None),
        ("<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>", None),
        ("[get_weather(city='Paris')]", None),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
        ("", None),
    ],
)
def test_format_is_found_in_the_template(template: str, name: str | None) -> None:
    found = detect_tool_format(template)
    assert (found and found.name) == name


def test_every_format_can_be_chosen_in_the_configuration() -> None:
    assert set(TOOL_CALL_FORMATS) == {"auto", "none", *TOOL_FORMATS}
