"""Grammars of tool calls: the texts that they allow, which the parsers must read."""

from __future__ import annotations

import functools
import json
import random
import re
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from protocol.errors import InvalidRequestError
from router.grammars.lark import Spelling
from router.grammars.structured_outputs import tag_grammar
from router.grammars.tool_grammar import MAX_CALLS, OfferedFunction, after_thinking, tool_grammar
from router.parsing import formats, tagged
from router.parsing.formats import TOOL_FORMATS, Parsing
from router.parsing.parameters import parameters_of
from router.parsing.reasoning import GRANITE, HARMONY, THINK
from tests.router.conftest import byte_level_tokenizer
from tests.router.grammars.test_structured_outputs import grammar_of
from tests.router.parsing.test_parsing import FORMS, TAGS, block, in_form, parsed

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OFFERS = [
    OfferedFunction("get_weather", WEATHER, True),
    OfferedFunction("now", None, False),
    OfferedFunction("any", {"type": "object"}, False),
]
PARIS = '{"city": "Paris", "days": 3}'
MARKERS = frozenset(
    {marker for each in TOOL_FORMATS.values() for marker in each.markers} | {"<think>", "</think>"}
)


class Model:
    """A tokenizer whose marks are added tokens, or plain text."""

    def __init__(self, has_tokens: bool) -> None:
        self.has_tokens = has_tokens
        self.fast = byte_level_tokenizer(500)
        if has_tokens:
            self.fast.add_tokens([AddedToken(text, normalized=False) for text in sorted(MARKERS)])
        self.ll = LLTokenizer(self.fast.to_str(), eos_token=1)
        self.spelling = Spelling(MARKERS, self.fast.token_to_id)
        self._matcher = functools.cache(self._compiled)

    def _compiled(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self.ll, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def takes(self, grammar: str, text: str) -> bool:
        """Tell whether `text` can be a whole answer."""
        matcher = self._matcher(grammar).deep_copy()
        token_ids = self.fast.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@functools.cache
def model_of(has_tokens: bool) -> Model:
    return Model(has_tokens)


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "texts"])
def model(request):
    return model_of(request.param)


def calls(form: formats.CallForm) -> list[str]:
    """Return answers with one call and, if the form has several, with two."""
    one = block(form, ("get_weather", PARIS))
    if form.separator is not None:
        return [one, block(form, ("get_weather", PARIS), ("now", "{}"))]
    return [one] if form.between is None else [one, one + form.between + block(form, ("now", "{}"))]


def bad(form: formats.CallForm) -> list[str]:
    of_weather = [
        '{"city": "Paris", "days": 1.5}',
        '{"city": "Paris"}',
        '{"city": "Paris", "days": 3, "x": 1}',
    ]
    texts = [
        *(block(form, ("get_weather", arguments)) for arguments in of_weather),
        block(form, ("now", '{"x": 1}')),
        block(form, ("other", "{}")),
    ]
    if form.trigger and form.elsewhere:
        other = "<tool_call>[" if form is formats.GRANITE else ""
        texts += [text.replace(form.trigger + form.open, other) for text in texts]
    if form.tags is None:
        texts.append(block(form, ("get_weather", '{"city": 3, "days": 3}')))
    if form.tags is form.notation is None:
        texts.append(block(form, ("any", "[]")))
    return texts


def thoughts(kind: str) -> str:
    marks = HARMONY if kind == "openai" else THINK
    return f"{marks.open[0]} 1 < 2, {{hm}} {marks.close[0]}"


@pytest.mark.parametrize(("kind", "form"), FORMS.values(), ids=FORMS)
def test_demanded_calls(model, kind, form):
    marks = HARMONY if kind == "openai" else THINK
    grammar = tool_grammar(form, OFFERS, model.spelling, demanded=True, several=True, marks=marks)
    for text in [*calls(form), block(form, ("any", '{"a": "b", "c": "d"}'))]:
        assert model.takes(grammar, text)
        assert model.takes(grammar, thoughts(kind) + text)
    for text in [*bad(form), "", "hello", thoughts(kind), "hello " + calls(form)[0]]:
        assert not model.takes(grammar, text)


@pytest.mark.parametrize(("kind", "form"), FORMS.values(), ids=FORMS)
def test_calls_beside_text(model, kind, form):
    grammar = tool_grammar(form, OFFERS, model.spelling, demanded=False, several=True, marks=None)
    begin = "I look. " if form.trigger else ""
    for text in ["", "a < b {x}", *(begin + text for text in calls(form))]:
        assert model.takes(grammar, text)
    for text in bad(form):
        assert not model.takes(grammar, begin + text)


@pytest.mark.parametrize(("kind", "form"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("demanded", [True, False])
def test_the_number_of_calls_is_bounded(model, kind, form, demanded):
    if form.separator is None and form.between is None:
        return

    def answer(number: int) -> str:
        return in_form(form, *[("now", "{}")] * number)

    for several, most in ((True, MAX_CALLS), (False, 1)):
        grammar = tool_grammar(form, OFFERS, model.spelling, demanded=demanded, several=several)
        assert model.takes(grammar, answer(most))
        assert not model.takes(grammar, answer(most + 1))


def test_a_strict_function_leaves_harmonys_final_channel():
    model = model_of(True)
    grammar = tool_grammar(
        formats.HARMONY, OFFERS, model.spelling, demanded=False, several=True, marks=HARMONY
    )
    thought = HARMONY.open[0] + "Hm." + HARMONY.close[0]
    for before in ("", thought):
        assert model.takes(grammar, f"{before}{HARMONY.lead}It rains.")
        assert model.takes(grammar, before + calls(formats.HARMONY)[0])
    assert not model.takes(grammar, bad(formats.HARMONY)[0])


QWEN3 = formats.tagged_form(tagged.QWEN3)
ARGUMENTS = {
    "none": {},
    "an optional one": {"days": 3},
    "of Unicode": {"city": "Zürich 🙂 \u2028", "days": -1},
    "white space": {"city": " \n a\n\n", "days": 0},
    "empty": {"city": ""},
    "JSON in a string": {"city": '{"a": "\\n"}', "options": {"a": [{"b": [None, 1.5, "é </x>"]}], "c": {}}},
    "tags in a string": {
        "city": "<b> < </function>\n</tool_call></invoke> <parameter=x> <arg_key> </arg_value"
    },
}
TRIP = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"}},
    "additionalProperties": False,
}


TELLING = ["of Unicode", "white space", "JSON in a string", "tags in a string"]
"""The arguments of which every beginning is parsed, also with marks that are tokens."""
CASES = [(False, name) for name in ARGUMENTS] + [(True, name) for name in TELLING]


@pytest.mark.parametrize(("has_tokens", "name"), CASES, ids=str)
@pytest.mark.parametrize(("kind", "form"), FORMS.values(), ids=FORMS)
def test_texts_of_the_grammar_are_parsed_however_they_are_split_or_cut(kind, form, has_tokens, name):
    model, arguments = model_of(has_tokens), ARGUMENTS[name]
    offers = [OfferedFunction("trip", TRIP, True), OfferedFunction("now", None, False)]
    wanted = [("trip", json.dumps(arguments, ensure_ascii=False)), ("now", "{}")]
    has_one = form.separator is None and form.between is None
    wanted = wanted[:1] if has_one else wanted
    text, marks = in_form(form, *wanted), HARMONY if kind == "openai" else THINK
    grammar = tool_grammar(form, offers, model.spelling, demanded=True, several=True, marks=marks)
    said = f"{marks.open[0]}Hm.{marks.close[0]}{text}"
    assert model.takes(grammar, said) or (model.has_tokens and "<b>" in said)  # no marks within strings
    known = {offer.name: parameters_of(offer.schema) for offer in offers}
    is_harmony = kind == "openai"
    parsing = Parsing(tools=kind, known=known, is_harmony=is_harmony, marks=marks)
    assert parsed(parsing, [said]) == parsed(parsing, list(said)) == ("Hm.", "", wanted)
    if has_tokens or form.tags is None or name not in TELLING:
        return
    for cut in range(len(said) - len(text), len(said)):
        _, content, found = parsed(parsing, [said[:cut]], is_cut=True)
        assert content in ("", "<")
        for (name, start), (whole_name, whole) in zip(found, wanted, strict=False):
            assert name == whole_name and whole.startswith(start), said[:cut]


PARAMETERS = {
    "text": {"type": "string"},
    "short": {"type": "string", "minLength": 1, "maxLength": 3},
    "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"},
    "part": {"type": "string", "pattern": "a|b"},
    "day": {"type": "string", "format": "date"},
    "mail": {"type": "string", "format": "email"},
    "unit": {"enum": ["celsius", "kelvin"]},
    "mixed": {"enum": ["a", 1, None]},
    "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    "either": {"type": ["string", "integer"], "maximum": 5},
    "list or text": {
        "anyOf": [{"type": "array", "items": {"type": "integer"}, "maxItems": 2}, {"type": "string"}]
    },
    "kind": {"$ref": "#/$defs/Kind"},
    "const": {"const": "x y"},
    "same": {"$ref": "#/properties/place"},
    "count": {"type": "integer", "minimum": 1, "maximum": 20},
    "is": {"type": "boolean"},
    "place": {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "any": {},
}
SCHEMA = {
    "type": "object",
    "properties": PARAMETERS,
    "required": [name for number, name in enumerate(PARAMETERS) if number % 3],
    "additionalProperties": False,
    "$defs": {"Kind": {"type": "string", "enum": ["one", "two"]}},
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", TAGS)
def test_random_calls_satisfy_their_schemas(name, seed):
    """Texts are random within the grammar. Closing marks are tried often, so that values end."""
    model, rng, tags = model_of(bool(seed)), random.Random(seed), TAGS[name]
    offers = [OfferedFunction("f", SCHEMA, True)]
    grammar = tool_grammar(formats.tagged_form(tags), offers, model.spelling, demanded=True, several=False)
    matcher, token_ids = LLMatcher(model.ll, grammar, log_level=0), []
    closing = [
        model.fast.encode(text, add_special_tokens=False).ids
        for text in (tags.pad + tags.value_end, '"', "]", "}")
    ]
    while not matcher.is_stopped():
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        chosen = [int(rng.choice(np.flatnonzero(mask)))]
        for text in rng.sample(closing, len(closing)):
            if rng.random() < 0.3 and matcher.validate_tokens(text) == len(text):
                chosen = text
        assert matcher.consume_tokens(chosen)
        token_ids += chosen
    said = model.fast.decode(token_ids, skip_special_tokens=False).removesuffix("<|end|>")
    parsing = Parsing(tools=name, known={"f": parameters_of(SCHEMA)})
    _, content, ((_, arguments),) = parsed(parsing, [said])
    assert content == ""
    jsonschema.validate(json.loads(arguments), SCHEMA, format_checker=jsonschema.FormatChecker())


EITHER = {"anyOf": [{"enum": ["7", "a"]}, {"type": "integer", "maximum": 5}]}
LIST_OR_TEXT = {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "string"}]}


@pytest.mark.parametrize(
    ("schema", "takes", "refuses"),
    [
        ({"type": ["integer", "string"], "maximum": 5}, ["5", "-3", "a 7", "-x"], ["7", "7a", " 7", "-.9"]),
        (EITHER, ["a", "5"], ["7", "b"]),
        (LIST_OR_TEXT, ["[1, 2]", "x [", ""], ['["a"]', "[", "\n[1"]),
        ({"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, ["null", "a\nb"], ["abcd"]),
        ({"type": "string", "minLength": 20}, ["a" * 20], ["a" * 19, "a\n</parameter>\n" + "a" * 20]),
    ],
)
def test_no_text_is_parsed_as_arguments_that_its_schema_refuses(model, schema, takes, refuses):
    whole = {"type": "object", "properties": {"p": schema}}
    grammar = tool_grammar(
        QWEN3, [OfferedFunction("f", whole, True)], model.spelling, demanded=True, several=False
    )

    def call(text: str) -> str:
        return block(QWEN3, ("f", json.dumps({"p": text})))

    assert all(model.takes(grammar, call(text)) for text in takes)
    assert not any(model.takes(grammar, call(text)) for text in refuses)


def test_values_beside_strings_that_are_marked_as_such(model):
    form, strings = TOOL_FORMATS["deepseek_v32"].forms[0][1], 'string="true">'
    schema = {
        "type": "object",
        "properties": {"p": {"type": ["string", "null", "boolean"]}},
        "required": ["p"],
    }
    grammar = tool_grammar(
        form, [OfferedFunction("f", schema, True)], model.spelling, demanded=True, several=False
    )
    for value in (None, True, False, "x"):
        text = block(form, ("f", json.dumps({"p": value})))
        assert (strings in text) == isinstance(value, str)
        assert model.takes(grammar, text)
    assert not model.takes(grammar, block(form, ("f", '{"p": 1}')))


REFUSED = {
    "properties.p.pattern: look-around": {"type": "string", "pattern": "(?=a)b"},
    "properties.p.pattern: its anchors": {"type": "string", "pattern": "^a|b$"},
    "properties.p.format: 'idn-email'": {"type": "string", "format": "idn-email"},
    "properties.p.not: cannot": {"type": "string", "not": {"const": "a"}},
    "properties.p.multipleOf: 0.123456789012 has": {"type": "number", "multipleOf": 0.123456789012},
}


@pytest.mark.parametrize(("reason", "schema"), REFUSED.items(), ids=REFUSED)
def test_a_strict_function_names_the_keyword_that_tags_cannot_express(model, reason, schema):
    schema = {"type": "object", "properties": {"p": schema}}

    def grammar(strict: bool) -> str:
        return tool_grammar(
            QWEN3, [OfferedFunction("f", schema, strict)], model.spelling, demanded=True, several=True
        )

    with pytest.raises(InvalidRequestError, match=re.escape(f"f: {reason}")):
        grammar(True)
    assert model.takes(grammar(False), block(QWEN3, ("f", '{"p": 1}')))


@pytest.mark.parametrize("strict", [True, False])
def test_an_argument_that_refers_to_itself_is_named(model, strict):
    schema = {"type": "object", "properties": {"p": {"$ref": "#/properties/p"}}}
    offers = [OfferedFunction("f", schema, strict)]
    with pytest.raises(InvalidRequestError, match=r"f: properties\.p\.\$ref: leads back to itself"):
        tool_grammar(QWEN3, offers, model.spelling, demanded=True, several=True)


NOTATIONS = {
    "choice": {"choice": ["yes", "no"]},
    "Lark": {"grammar": 'start: "yes" | "no"'},
    "GBNF": {"grammar": 'root ::= "yes" | "no"'},
    "regex": {"regex": "yes|no"},
    "JSON": {"json": {"enum": ["yes", "no"]}},
    "tags": {
        "structural_tag": {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}
    },
}


@pytest.mark.parametrize("marks", [THINK, GRANITE, HARMONY], ids=["think", "granite", "harmony"])
@pytest.mark.parametrize("wanted", NOTATIONS.values(), ids=NOTATIONS)
def test_any_notation_after_thoughts(model, marks, wanted):
    """Only the gap after the thoughts separates them from the answer."""
    says = {"json": '"yes"', "structural_tag": "see <f>1</f>"}.get(next(iter(wanted)), "yes")
    plain = grammar_of({"structured_outputs": wanted}).text
    grammar = after_thinking(plain, model.spelling, marks, is_open=False)
    thought = f"{marks.open[0]}Hm.{marks.close[0]}"
    whole = [marks.lead + says, thought + marks.gap + marks.lead + says]
    assert all(model.takes(grammar, text) for text in whole)
    assert "structural_tag" in wanted or not any(
        model.takes(grammar, text.replace(says, space + says)) for text in whole for space in SPACES
    )
    grammar = after_thinking(plain, model.spelling, marks, is_open=True)
    rest = whole[1].removeprefix(marks.open[0])
    assert model.takes(grammar, rest) and not model.takes(grammar, says)


def test_tags_of_tokens_beside_tags_of_texts():
    model = model_of(True)
    tokens: dict[str, Any] = {text: model.fast.token_to_id(text) for text in ("<tool_call>", "</tool_call>")}
    structures = [
        {"begin": "<tool_call>f", "schema": {"type": "integer"}, "end": "</tool_call>"},
        {"begin": "<g>", "schema": {"type": "boolean"}, "end": "</g>"},
    ]
    raw = json.dumps({"structures": structures, "triggers": ["<tool_call>", "<g>"]}).encode()
    grammar = tag_grammar(raw, "f", tokens)
    assert model.takes(grammar, "a <tool_call>f5</tool_call> <g>true</g> <tool_call>f6</tool_call>")
    for text in ("<tool_call>f", "<tool_call>ftrue</tool_call>", "<g>5</g>", "</tool_call>"):
        assert not model.takes(grammar, text)


SPACES = [" ", "\n", "\u2003", "\u205f"]


def test_white_space_before_calls_is_bounded_and_of_json(model):
    grammar = tool_grammar(formats.HERMES, OFFERS, model.spelling, demanded=True, several=True, marks=THINK)
    call = calls(formats.HERMES)[0]
    for before in ("", "<think>Hm.</think>"):
        assert model.takes(grammar, f"{before} \n\t\r{call}")
        assert not any(model.takes(grammar, before + space + call) for space in ["\n" * 5, *SPACES[2:], "\v"])


def test_unsupported_keywords_only_matter_to_strict_functions(model):
    schema = {"type": "object", "properties": {}, "unevaluatedProperties": False}
    for strict in (False, True):
        offers = [OfferedFunction("f", schema, strict)]
        grammar = tool_grammar(formats.HERMES, offers, model.spelling, demanded=True, several=True)
        assert LLMatcher(model.ll, grammar, log_level=0).is_error() is strict
