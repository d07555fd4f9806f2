"""Arguments of calls in a conversation: whatever a server sent is accepted back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import InvalidRequestError
from router.openai_types import MAX_ARGUMENT_BYTES
from router.text.chat_template import CallArguments, call_arguments

TAKEN = {
    "an object": ('{"a": [1, null]}', {"a": [1, None]}),
    "nothing": ("", {}),
    "white space": (" \n ", {}),
    "null": ("null", {}),
    "a line's end in a string": ('{"a": "x\ny"}', {"a": "x\ny"}),
    "cut off in a string": ('{"city": "Par', {"city": "Par"}),
    "cut off in an escape": ('{"a": "x\\', {"a": "x"}),
    "cut off in a code point": ('{"a": "x\\u00', {"a": "x"}),
    "cut off between surrogates": ('{"a": "x\\ud83d', {"a": "x"}),
    "cut off behind a backslash": ('{"a": "x\\\\', {"a": "x\\"}),
    "cut off in a key": ('{"a": 1, "b', {"a": 1}),
    "cut off behind a key": ('{"a": 1, "b":', {"a": 1}),
    "cut off behind a key with a quote": ('{"a": 1, "\\""', {"a": 1}),
    "cut off in a key's escape": ('{"a": 1, "b\\', {"a": 1}),
    "cut off in a word": ('{"a": {"b": [tr', {"a": {"b": []}}),
    "cut off behind a comma": ('{"a": [1,', {"a": [1]}),
    "half a character": ('{"a": "\\ud800"}', {"a": "?"}),
    "a large number": ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
    "a list": ("[1, 2]", {"arguments": [1, 2]}),
    "no JSON": ("{'a': 1}", {"arguments": "{'a': 1}"}),
    "no JSON, cut off": ("{'a': 1", {"arguments": "{'a': 1"}),
    "brackets that differ": ('{"a": 1]', {"a": 1}),
    "too deep": ("[" * 100_000, {"arguments": "[" * 100_000}),
}


@pytest.mark.parametrize(("text", "expected"), TAKEN.values(), ids=TAKEN)
def test_arguments_become_objects(text, expected):
    found = call_arguments(text, "x")
    assert type(found) is CallArguments and found == expected
    assert json.loads(str(found)) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4), st.booleans(), st.data())
def test_an_object_cut_off_anywhere_is_closed(whole, is_ascii, data):
    text = json.dumps(whole, ensure_ascii=is_ascii)
    found = call_arguments(text[: data.draw(st.integers(1, len(text)))], "x")
    keys = list(whole)
    assert list(found) == keys[: len(found)]
    assert all(found[key] == whole[key] for key in keys[: max(0, len(found) - 1)])


def test_the_limit_is_named():
    assert len(call_arguments('{"a": "' + "x" * (MAX_ARGUMENT_BYTES - 7), "x")["a"]) > 10**6
    with pytest.raises(InvalidRequestError, match=f"field: at most {MAX_ARGUMENT_BYTES} bytes"):
        call_arguments(" " * (MAX_ARGUMENT_BYTES + 1), "field")


def test_templates_use_the_arguments():
    arguments = CallArguments({"a": "é"})
    assert "<" + arguments + ">" == '<{"a": "é"}>'
    assert f"{arguments}" == '{"a": "é"}' and arguments["a"] == "é"
