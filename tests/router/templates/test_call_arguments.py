"""Arguments of calls in a conversation: whatever a server sent is accepted back."""

from __future__ import annotations

import json

import pytest

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
    "cut off between surrogates": ('{"a": "x\\ud83d', {"a": "x"}),
    "cut off in a key": ('{"a": 1, "b', {"a": 1}),
    "cut off in a word": ('{"a": {"b": [tr', {"a": {"b": []}}),
    "half a character": ('{"a": "\\ud800"}', {"a": "?"}),
    "a large number": ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
    "a list": ("[1, 2]", {"arguments": [1, 2]}),
    "no JSON": ("{'a': 1}", {"arguments": "{'a': 1}"}),
    "no JSON, cut off": ("{'a': 1", {"arguments": "{'a': 1"}),
    "a line's end, cut off": ('{"a": "x\ny', {"a": "x\ny"}),
    "brackets that differ": ('{"a": 1]', {"arguments": '{"a": 1]'}),
    "two objects": ('{"a": 1}{"b": 2}', {"arguments": '{"a": 1}{"b": 2}'}),
    "too deep": ("[" * 100_000, {"arguments": "[" * 100_000}),
}


@pytest.mark.parametrize(("text", "expected"), TAKEN.values(), ids=TAKEN)
def test_arguments_become_objects(text, expected):
    found = call_arguments(text, "x")
    assert type(found) is CallArguments and found == expected
    assert json.loads(str(found)) == expected


def test_an_object_cut_off_anywhere_is_closed():
    whole = {"a": 'x\n"\\ é🙂', "b": {"c": [True, None, -1.5e3]}, "d": []}
    for text in (json.dumps(whole), json.dumps(whole, ensure_ascii=False).replace("\\n", "\n")):
        for end in range(1, len(text)):
            found = call_arguments(text[:end], "x")
            assert list(found) == list(whole)[: len(found)]
            assert all(found[key] == whole[key] for key in list(found)[:-1])


def test_the_limit_is_named():
    assert len(call_arguments('{"a": "' + "x" * (MAX_ARGUMENT_BYTES - 7), "x")["a"]) > 10**6
    with pytest.raises(InvalidRequestError, match=f"field: at most {MAX_ARGUMENT_BYTES} bytes"):
        call_arguments(" " * (MAX_ARGUMENT_BYTES + 1), "field")


def test_templates_use_the_arguments():
    arguments = CallArguments({"a": "é"})
    assert "<" + arguments + ">" == '<{"a": "é"}>'
    assert f"{arguments}" == '{"a": "é"}' and arguments["a"] == "é"
