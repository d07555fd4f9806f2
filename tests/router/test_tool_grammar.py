"""Grammars of calls: what they let a model write, and that the parsers read it."""

from __future__ import annotations

import json

import pytest
from conftest import byte_level_tokenizer
from llguidance import LLMatcher, LLTokenizer
from test_parsing import TAGS, block, parsed
from test_structured_outputs import grammar_of
from tokenizers import AddedToken

from router.lark import Spelling
from router.parsing import forms
from router.parsing.formats import TOOL_FORMATS, Parsing
from router.parsing.parameters import parameters_of
from router.parsing.reasoning import GRANITE, HARMONY, THINK
from router.structural_tags import tag_grammar
from router.tool_grammar import MAX_CALLS, Offer, after_thinking, tool_grammar

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OFFERS = [
    Offer("get_weather", WEATHER, True),
    Offer("now", None, False),
    Offer("any", {"type": "object"}, False),
]
PARIS = '{"city": "Paris", "days": 3}'
MARKERS = frozenset(
    {marker for each in TOOL_FORMATS.values() for marker in each.markers} | {"<think>", "</think>"}
)
FORMS = {
    "hermes": ("hermes", forms.HERMES),
    "llama": ("llama3_json", forms.LLAMA3),
    "granite": ("granite", forms.GRANITE),
    "mistral": ("mistral", forms.MISTRAL),
    "mistral by name": ("mistral", forms.MISTRAL_NAMED),
    "deepseek": ("deepseek_v3", forms.DEEPSEEK_V3),
    "deepseek 3.1": ("deepseek_v31", forms.DEEPSEEK_V31),
    "kimi": ("kimi_k2", forms.KIMI_K2),
    "hunyuan": ("hunyuan_a13b", forms.HUNYUAN),
    "internlm": ("internlm", forms.INTERNLM),
    "phi": ("phi4_mini_json", forms.PHI4),
    "xlam": ("xlam", forms.XLAM),
    "harmony": ("openai", forms.HARMONY),
    **{name: (name, forms.tagged(tags)) for name, tags in TAGS.items()},
}


class Model:
    """A tokenizer whose marks are added tokens, or texts like others."""

    def __init__(self, has_tokens: bool) -> None:
        self.fast = byte_level_tokenizer(500)
        if has_tokens:
            self.fast.add_tokens([AddedToken(text, normalized=False) for text in sorted(MARKERS)])
        self.ll = LLTokenizer(self.fast.to_str(), eos_token=1)
        self.spelling = Spelling(MARKERS, self.fast.token_to_id)

    def takes(self, grammar: str, text: str) -> bool:
        """Whether `text` can be a whole answer."""
        matcher = LLMatcher(self.ll, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        token_ids = self.fast.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "texts"])
def model(request):
    return Model(request.param)


def calls(form: forms.CallForm) -> list[str]:
    """Answers with one call and, where the form has several, with two."""
    one = block(form, ("get_weather", PARIS))
    if form.separator is not None:
        return [one, block(form, ("get_weather", PARIS), ("now", "{}"))]
    return [one] if form.between is None else [one, one + form.between + block(form, ("now", "{}"))]


def bad(form: forms.CallForm) -> list[str]:
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
    if form.tags is None:
        texts += [block(form, ("get_weather", '{"city": 3, "days": 3}')), block(form, ("any", "[]"))]
    return texts


def thoughts(kind: str) -> str:
    marks = HARMONY if kind == "openai" else THINK
    return f"{marks.open[0]} 1 < 2, {{hm}} {marks.close[0]}"


@pytest.mark.parametrize(("kind", "form"), FORMS.values(), ids=FORMS)
def test_demanded_calls(model, kind, form):
    marks = HARMONY if kind == "openai" else THINK
    grammar = tool_grammar(form, OFFERS, model.spelling, demanded=True, several=True, marks=marks)
    for text in calls(form):
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
def test_one_call(model, kind, form):
    grammar = tool_grammar(form, OFFERS, model.spelling, demanded=True, several=False)
    assert model.takes(grammar, calls(form)[0])
    assert not any(model.takes(grammar, text) for text in calls(form)[1:])


@pytest.mark.parametrize(("kind", "form"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("demanded", [True, False])
def test_the_number_of_calls_is_bounded(model, kind, form, demanded):
    if form.separator is None and form.between is None:
        return
    grammar = tool_grammar(form, OFFERS, model.spelling, demanded=demanded, several=True)

    def answer(number: int) -> str:
        if form.separator is not None:
            return block(form, *[("now", "{}")] * number)
        return form.between.join([block(form, ("now", "{}"))] * number)

    assert model.takes(grammar, answer(MAX_CALLS))
    assert not model.takes(grammar, answer(MAX_CALLS + 1))


def test_a_strict_function_leaves_harmonys_final_channel():
    model = Model(has_tokens=True)
    grammar = tool_grammar(forms.HARMONY, OFFERS, model.spelling, demanded=False, several=True, marks=HARMONY)
    thought = HARMONY.open[0] + "Hm." + HARMONY.close[0]
    for before in ("", thought):
        assert model.takes(grammar, f"{before}{HARMONY.lead}It rains.")
        assert model.takes(grammar, before + calls(forms.HARMONY)[0])
    assert not model.takes(grammar, bad(forms.HARMONY)[0])


@pytest.mark.parametrize(("kind", "form"), FORMS.values(), ids=FORMS)
def test_the_parser_reads_what_the_grammar_has_written(kind, form):
    known = {offer.name: parameters_of(offer.schema) for offer in OFFERS}
    parsing = Parsing(tools=TOOL_FORMATS[kind], known=known, is_harmony=kind == "openai")
    both = [("get_weather", PARIS), ("now", "{}")]
    for text in calls(form):
        _, content, found = parsed(parsing, list(text))
        assert content == "" and found == both[: len(found)]
    assert len(found) == len(calls(form))


def test_an_answer_behind_thoughts(model):
    schema = LLMatcher.grammar_from_json_schema({"type": "integer"})
    grammar = after_thinking(schema, model.spelling, THINK, is_open=False)
    assert model.takes(grammar, "12") and model.takes(grammar, "<think>is it 3?</think>\n\n12")
    assert not model.takes(grammar, "<think>12") and not model.takes(grammar, "is it 3?</think>12")
    grammar = after_thinking(schema, model.spelling, GRANITE, is_open=True)
    assert model.takes(grammar, "is it 3? Here's my response: 12")
    assert not model.takes(grammar, "12")


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
def test_any_notation_behind_thoughts(model, marks, wanted):
    """No white space stands before the answer but the gap behind the thoughts."""
    says = {"json": '"yes"', "structural_tag": "see <f>1</f>"}.get(*wanted, "yes")
    grammar = after_thinking(grammar_of({"structured_outputs": wanted}).text, model.spelling, marks, False)
    thought = f"{marks.open[0]}Hm.{marks.close[0]}"
    whole = [marks.lead + says, thought + marks.gap + marks.lead + says]
    assert all(model.takes(grammar, text) for text in whole)
    assert "structural_tag" in wanted or not any(
        model.takes(grammar, text.replace(says, space + says)) for text in whole for space in SPACES
    )


def test_tags_of_tokens_beside_tags_of_texts():
    model = Model(has_tokens=True)
    tokens = {text: model.fast.token_to_id(text) for text in ("<tool_call>", "</tool_call>")}
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
    grammar = tool_grammar(forms.HERMES, OFFERS, model.spelling, demanded=True, several=True, marks=THINK)
    call = calls(forms.HERMES)[0]
    for before in ("", "<think>Hm.</think>"):
        assert model.takes(grammar, f"{before} \n\t\r{call}")
        assert not any(model.takes(grammar, before + space + call) for space in ["\n" * 5, *SPACES[2:], "\v"])


def test_keywords_that_cannot_be_kept_to_matter_to_strict_functions_alone(model):
    schema = {"type": "object", "properties": {}, "unevaluatedProperties": False}
    for strict in (False, True):
        offers = [Offer("f", schema, strict)]
        grammar = tool_grammar(forms.HERMES, offers, model.spelling, demanded=True, several=True)
        assert LLMatcher(model.ll, grammar, log_level=0).is_error() is strict
