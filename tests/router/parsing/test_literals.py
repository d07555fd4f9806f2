"""Arguments in Python's and Gemma's notation become JSON."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.parsing.formats import Parsing
from router.parsing.parameters import Parameters
from tests.router.grammars.test_argument_grammar import call
from tests.router.parsing.test_parsing import parsed

QUOTE = '<|"|>'
PYTHON = {
    "'It\\'s \"x\"'": 'It\'s "x"',
    '"a\\n\\t\\\\ \\x41\\u00e9\\U0001f642"': "a\n\t\\ Aé🙂",
    '"\\ud83d\\ude42"': "🙂",
    '"a/b \\/ \\d \\xZ\\u12"': "a/b / \\d \\xZ\\u12",
    "'a\\\nb'": "ab",
    "'''a'b\"c\n'''": "a'b\"c\n",
    '""': "",
    "True": True,
    "false": False,
    "None": None,
    "1_000": 1000,
    "0x1F": 31,
    ".5": 0.5,
    "+3": 3,
    "007": "007",
    "-1.5e-3": -0.0015,
    "(1, 'a',)": [1, "a"],
    "[]": [],
    "{}": {},
    "{'a': {1: [ ]}, \"b\" : ( ) , }": {"a": {"1": []}, "b": []},
    "New York": "New York",
    "date(2024, [1])": "date(2024, [1])",
    "'<|python_end|>'": "<|python_end|>",
    "[" * 2000 + "]" * 2000: None,
}
GEMMA = {
    f'{QUOTE}a "b"\\n\n{{}},:{QUOTE}': 'a "b"\\n\n{},:',
    f"{QUOTE}<tool_call|>{QUOTE}": "<tool_call|>",
    f"{QUOTE}{QUOTE}": "",
    "true": True,
    "null": None,
    "-2.5": -2.5,
    "Rome (Italy)": "Rome (Italy)",
    f"{{a:{{{QUOTE}b c{QUOTE}:[1,{QUOTE}x{QUOTE},[],{{}}]}}}}": {"a": {"b c": [1, "x", [], {}]}},
}


@pytest.mark.parametrize("text", PYTHON)
def test_python(text):
    check("pythonic", f"[f(a={text}, b = 1)]", text, PYTHON[text])


@pytest.mark.parametrize("text", GEMMA)
def test_gemma(text):
    check("gemma4", f"<|tool_call>call:f{{a:{text},b: 1}}<tool_call|>", text, GEMMA[text])


def check(kind, whole, text, expected):
    parsing = Parsing(tools=kind, known={"f": Parameters()})
    found = parsed(parsing, [whole])
    assert found == parsed(parsing, list(whole))
    _, content, ((name, arguments),) = found
    assert (name, content) == ("f", "")
    if text.startswith("[["):
        assert arguments == f'{{"a": {text}, "b": 1}}'
    else:
        assert json.loads(arguments) == {"a": expected, "b": 1}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["pythonic", "gemma4", "repr"]), st.dictionaries(st.sampled_from("abc"), JSON), st.data()
)
def test_any_arguments_are_kept_and_a_cut_gives_their_beginning(kind, arguments, data):
    if kind == "repr":
        texts = (f"{key}={value!r}" for key, value in arguments.items())
        whole, kind = f"[f({', '.join(texts)})]", "pythonic"
        ast.parse(whole)
    else:
        whole = call(kind, arguments)
    if kind == "gemma4" and QUOTE in json.dumps(arguments):
        return
    parsing = Parsing(tools=kind, known={"f": Parameters()})
    _, content, ((_, found),) = parsed(parsing, list(whole))
    assert content == "" and json.loads(found) == arguments
    cut = data.draw(st.integers(len(whole) // 2, len(whole)))
    _, content, calls = parsed(parsing, list(whole[:cut]), is_cut=True)
    for _, beginning in calls:
        assert content == "" and found.startswith(beginning)
