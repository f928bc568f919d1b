"""The form of an answer as a request states it, before any model has seen it."""

from __future__ import annotations

import pytest

from dspark.errors import RequestError
from dspark.request import SamplingParams
from dspark.structure import MAX_STRUCTURE_LEN, Structure


def test_a_structure_is_what_it_says_and_equal_to_another_that_says_the_same():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert Structure.json_schema(schema).text == '{"type": "object", "properties": {"b": {}, "a": {}}}'
    assert Structure.json_schema(' {"type":"object",  "properties":{"b":{},"a":{}}}') == Structure.json_schema(schema)
    assert Structure.json_object() == Structure.json_schema({"type": "object"})
    assert Structure.choice(["x", 'y"']).text == '["x", "y\\""]'
    assert hash(Structure.regex("a")) == hash(Structure(kind="regex", text="a"))
    assert SamplingParams(structure=Structure.regex("a")).changes_logits


@pytest.mark.parametrize(
    "make",
    [
        lambda: Structure.json_schema("{"),
        lambda: Structure.json_schema("[]"),
        lambda: Structure.json_schema([1]),
        lambda: Structure.json_schema({"default": {1, 2}}),
        lambda: Structure.choice([]),
        lambda: Structure.choice(["a", ""]),
        lambda: Structure.choice("ab"),
        lambda: Structure.regex(3),
        lambda: Structure.regex("a" * (MAX_STRUCTURE_LEN + 1)),
        lambda: Structure.regex("\ud800"),
        lambda: Structure.regex("a", after=""),
        lambda: Structure(kind="xml", text="a"),
        lambda: SamplingParams(structure={"type": "object"}),
    ],
)
def test_what_is_no_structure_is_refused(make):
    with pytest.raises(RequestError) as caught:
        make()
    assert caught.value.param == "structure"
