"""Grammars in llama.cpp's notation accept the texts that llama.cpp accepts."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from protocol.errors import InvalidRequestError
from tests.router.grammars.test_structured_outputs import grammar_of

BYTES = LLTokenizer("byte")


def matcher(grammar: str) -> LLMatcher:
    made = grammar_of({"structured_outputs": {"grammar": grammar}})
    assert made is not None
    return LLMatcher(BYTES, made.text, log_level=0)


def takes(grammar: str, text: str) -> bool:
    at, tokens = matcher(grammar), list(text.encode())
    assert not at.is_error(), at.get_error()
    return at.try_consume_tokens(tokens) == len(tokens) and at.is_accepting()


CASES: dict[str, tuple[list[str], list[str]]] = {
    r'root ::= "a\u00e9\u0041\u1234\U0001F600"': (["aéA\u1234\U0001f600"], ["a"]),
    r'root ::= "\x41\x7f\x01\xe9"': (["A\x7f\x01é"], []),
    'root ::= "a\x7f\n\tb"': (["a\x7f\n\tb"], ["ab"]),
    r'root ::= "\[it\'s \"q\" \\ \n/#]"'.replace("\\'", "'"): (['[it\'s "q" \\ \n/#]'], []),
    r'root ::= "" | "a"': (["", "a"], ["b"]),
    r"root ::= [\u00e9-\u00ff]": (["é", "ÿ"], ["a"]),
    r"root ::= [\U0001F600-\U0001F64F]": (["\U0001f601"], ["a"]),
    r"root ::= [a&&b]": (["a", "&", "b"], ["c"]),
    r"root ::= [a~~b]": (["a", "~", "b"], []),
    r"root ::= [+--]": (["+", ",", "-"], [".", "*"]),
    r"root ::= [--/]": (["-", ".", "/"], [","]),
    r"root ::= [-a]": (["-", "a"], ["b"]),
    r"root ::= [a-]": (["-", "a"], ["b"]),
    r"root ::= [a^[]": (["a", "^", "["], ["]"]),
    r"root ::= [^^\]]": (["a"], ["^", "]", "ab"]),
    r"root ::= [\x30-\x39]+": (["12"], ["a"]),
    r'root ::= [^"\\\x7F\x00-\x1F]*': (["ab é/"], ['"', "\\", "\x7f", "\n"]),
    "root ::= .": (["a", "\n", "\U0010ffff"], ["", "ab"]),
    'root ::= one # "not ::= a rule\none ::= "a"': (["a"], ["b"]),
    'root ::= item*\nitem ::= "start: x" | [ \\t]': (["start: x "], ["start"]),
}


@pytest.mark.parametrize("grammar", CASES)
def test_texts(grammar: str) -> None:
    right, wrong = CASES[grammar]
    assert [text for text in right if not takes(grammar, text)] == []
    assert [text for text in wrong if takes(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (r'root ::= "\ud83d"', r"\ud83d is no character"),
        (r'root ::= "\U00110000"', r"\U00110000 is no character"),
        (r"root ::= [\d]", r"\d is no escape of GBNF"),
        ('root ::= "a', "end of input"),
        ('root ::= "a\\"', "is no escape"),
        ("root ::= [a", "end of input"),
        ("expr ::= expr", "No 'root' rule"),
        ("root ::= " + "(" * 5000, "recursion"),
    ],
)
def test_errors_name_what_is_wrong(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        matcher(grammar)
    assert refused.value.field == "structured_outputs.grammar" and reason in refused.value.message


def test_lark_is_not_mistaken_for_gbnf() -> None:
    assert takes('start: "::=" /a ::= b/\n// root ::= "x"', "::=a ::= b")
    assert matcher("hello").is_error()
