"""Tool calls and reasoning are found in models' texts, however these are split into pieces."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.parsing import formats, json_formats, literals, tagged
from router.parsing.answer import Arguments, CallStart, Content, Part, Reasoning
from router.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerParser,
    Parsing,
    reasoning_format,
    tool_format,
)
from router.parsing.parameters import as_json, parameters_of
from router.parsing.reasoning import GRANITE, HARMONY, THINK

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
    "add": {
        "properties": {"a": {"type": "integer"}, "b": {"type": "number"}, "x": {"type": ["null", "string"]}}
    },
}
KNOWN = {name: parameters_of(schema) for name, schema in SCHEMAS.items()}
PARIS = '{"city": "Paris {[ \\"ô\\"", "days": [1, {"a": null}]}'
ADD = '{"a": 1, "b": -1e+30}'
CALLS = [("get_weather", PARIS), ("add", ADD)]


def of(tools: str | None = None, reasoning: str | None = None, is_open: bool = False, **more: Any) -> Parsing:
    is_harmony = tools == "openai" or reasoning == "openai_gptoss"
    marks = None if reasoning is None else REASONING_FORMATS[reasoning].marks
    return Parsing(tools=tools, known=KNOWN, is_harmony=is_harmony, marks=marks, is_open=is_open, **more)


def parsed(
    parsing: Parsing, pieces: list[str], is_cut: bool = False
) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, content and calls."""
    parser = AnswerParser(parsing)
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish(is_cut=is_cut)
    calls: list[tuple[str, str]] = []
    for part in parts:
        if isinstance(part, CallStart):
            calls.append((part.name, ""))
        elif isinstance(part, Arguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    text = "".join(part.text for part in parts if isinstance(part, Content))
    return "".join(part.text for part in parts if isinstance(part, Reasoning)), text, calls


def both(arguments: str = "arguments") -> tuple[str, str]:
    return (f'{{"name": "get_weather", "{arguments}": {PARIS}}}', f'{{"name": "add", "{arguments}": {ADD}}}')


def in_tags(tags: tagged.Tags, arguments: str) -> str:
    """Write arguments as tagged parameters, spelled as in the JSON."""
    texts = []
    for key, value in json.loads(arguments).items():
        end = tags.key_end if tags.kinds is None else tags.kinds[not isinstance(value, str)]
        end += (tags.line + tags.value if tags.value else "") + tags.pad
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        texts.append(f"{tags.key}{key}{end}{text}{tags.pad}{tags.value_end}{tags.line}")
    return "".join(texts)


TAGS = {
    "qwen3_coder": tagged.QWEN3,
    "mimo": tagged.MIMO,
    "glm45": tagged.GLM45,
    "glm47": tagged.GLM47,
    "minimax_m2": tagged.MINIMAX,
    "deepseek_v32": tagged.DEEPSEEK32,
    "deepseek_v4": tagged.DEEPSEEK4,
    "hy_v3": tagged.HY3[1],
}


def in_notation(notation: literals.Literals, arguments: str) -> str:
    """Write arguments in Python's or Gemma's notation."""
    write, comma = (gemma, ",") if notation is literals.GEMMA else (python, ", ")
    return comma.join(f"{key}{notation.assign}{write(value)}" for key, value in json.loads(arguments).items())


def python(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(python, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {python(each)}' for key, each in value.items())}}}"
    return repr(value)


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma(each)}' for key, each in value.items())}}}"
    return json.dumps(value)


def block(form: formats.CallForm, *calls: tuple[str, str]) -> str:
    """Write calls as a grammar makes a model write them."""
    texts = []
    for name, arguments in calls:
        written = arguments if form.tags is None else in_tags(form.tags, arguments)
        if form.notation is not None:
            written = in_notation(form.notation, arguments)
        texts.append(form.begin.replace("%s", name).replace("%d", "0") + written + form.end)
    return form.trigger + form.open + (form.separator or "").join(texts) + form.close


def in_form(form: formats.CallForm, *calls: tuple[str, str]) -> str:
    """Write calls in as many blocks as the form needs."""
    if form.between is None:
        return block(form, *calls)
    return form.between.join(block(form, call) for call in calls)


FORMS = {
    f"{name} {number}": (name, form)
    for name, each in {id(each): (name, each) for name, each in reversed(TOOL_FORMATS.items())}.values()
    for number, (_, form) in enumerate(each.forms)
}
"""Each form that grammars write, after the name of its format."""


def written(form: formats.CallForm) -> tuple[str, str, list[tuple[str, str]]]:
    """Return an answer in the form, its content and its calls."""
    said = "I look." if form.trigger and form is not formats.HARMONY else ""
    calls = CALLS[:1] if form is formats.HARMONY else CALLS
    return f"{said}\n{in_form(form, *calls)}" if said else in_form(form, *calls), said, calls


V31, KIMI = json_formats.DEEPSEEK_V31, json_formats.KIMI_K2
PYTHONIC = in_form(formats.PYTHONIC, *CALLS)
HERMES = "I look.\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in both())
TEXTS = {
    **{key: (name, *written(form)) for key, (name, form) in FORMS.items()},
    "llama with its tag": ("llama3_json", "I look.<|python_tag|>" + ";".join(both()), "I look.", CALLS),
    "mistral by name": (
        "mistral",
        f"I look. [TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{PARIS}[TOOL_CALLS]add{ADD}",
        "I look.",
        CALLS,
    ),
    "kimi without a section": (
        "kimi_k2",
        f"I look.{KIMI.call}functions.add:3{KIMI.begin}{ADD}{KIMI.ends[-1]}",
        "I look.",
        CALLS[1:],
    ),
    "xlam in a code block": ("xlam", "I look.\n```json\n[" + ",\n".join(both()) + "]\n```", "I look.", CALLS),
    "xlam in a block of no language": ("xlam", "```\n" + both()[1] + "```\n Done.", "Done.", CALLS[1:]),
    "pythonic with marks": (
        "llama4_pythonic",
        f"I look.<|python_start|>{PYTHONIC}<|python_end|> Done.",
        "I look.\nDone.",
        CALLS,
    ),
    "tags without the block's": (
        "qwen3_coder",
        "<function=add>\n<parameter=a>\n1\n</parameter>\n</tool_call> Done.",
        "Done.",
        [("add", '{"a": 1}')],
    ),
    "tags at the answer's end": (
        "mimo",
        "<tool_call><function=add><parameter=a>1</parameter>",
        "",
        [("add", '{"a": 1}')],
    ),
    "tags of unknown names": (
        "minimax_m2",
        '<minimax:tool_call><invoke name="add"><parameter name="a">one</parameter>\n'
        '<parameter name="c">2</parameter></invoke>\n'
        '<invoke name="other"><parameter name="b">3</parameter></invoke></minimax:tool_call>',
        "",
        [("add", '{"a": "one", "c": "2"}'), ("other", '{"b": "3"}')],
    ),
    "tags that tell types": (
        "deepseek_v4",
        f'<{tagged.DSML}tool_calls><{tagged.DSML}invoke name="add">'
        + "".join(
            f'<{tagged.DSML}parameter name="{name}"{kind}>{value}</{tagged.DSML}parameter>'
            for name, kind, value in (
                ("a", ' string="true"', "1"),
                ("x", ' string="true"', "null"),
                ("y", ' string="false"', "null"),
                ("z", ' string="false"', "nil"),
                ("b", "", "2"),
            )
        )
        + f"</{tagged.DSML}invoke></{tagged.DSML}tool_calls>",
        "",
        [("add", '{"a": 1, "x": "null", "y": null, "z": "nil", "b": 2}')],
    ),
    "a tag without its end": (
        "qwen3_coder",
        "<tool_call><function=add><parameter=a\nNo.",
        "<parameter=a\nNo.",
        [("add", "{")],
    ),
    "text between tags": (
        "glm47",
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value> and <arg_key>b</arg_key>",
        "and <arg_key>b</arg_key>",
        [("add", '{"a": 1')],
    ),
    "harmony after a preamble": (
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.add"
        f"<|channel|>commentary json<|message|>{ADD}<|call|>",
        "I look.",
        CALLS[1:],
    ),
    "arguments first, and more": (
        "hermes",
        f'<tool_call>{{"id": "x", "arguments": {ADD}, "extra": [1], "name": "add"}}</tool_call> Done.',
        "Done.",
        CALLS[1:],
    ),
    "arguments in a string": (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {json.dumps(ADD)}}}</tool_call>',
        "",
        CALLS[1:],
    ),
    "no arguments": ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    "content around a call": (
        "hermes",
        f"One.\n\n<tool_call>{both()[1]}</tool_call>\n\nTwo. \n",
        "One.\nTwo. \n",
        CALLS[1:],
    ),
    "cut off": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b',
        "",
        [("add", '{"a": 1, "b')],
    ),
}
CONTENT = {
    "a tag that is none": ("hermes", "a < b <tool_cal> c"),
    "a call that is none": ("hermes", "Say <tool_call>hello</tool_call>. "),
    "a call cut off in its name": ("hermes", 'x <tool_call>\n{"name": "ad'),
    "a name of a lone surrogate": ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    "an answer of JSON": ("llama3_json", '{"name": "Paris", "parameters": {"a": 1}}'),
    "a list of names": ("llama3_json", ' [{"title": 1}]'),
    "code": ("llama3_json", "<|python_tag|>print(1)"),
    "a mark alone": ("mistral", "[TOOL_CALLS]nothing that is called"),
    "marks alone": ("deepseek_v31", f"{V31.open}{V31.call}x{V31.begin}[]"),
    "a section without a call": ("kimi_k2", f"{KIMI.open}add {{}}"),
    "an interpreter's call": ("internlm", "<|action_start|><|interpreter|>\nprint(1)<|action_end|>"),
    "a module": ("phi4_mini_json", "import functools\nfunctools[0]"),
    "a list": ("pythonic", "[1, 2, add]"),
    "a link": ("pythonic", "[add](http://a/b)"),
    "a call without names": ("pythonic", "[add(1, 2)]"),
    "a call of no offered function": ("pythonic", "[sin(x=1)]"),
    "a call without a list": ("pythonic", "add(a=1)"),
    "a call of no arguments": ("gemma4", "<|tool_call>call:add<tool_call|>"),
    "a code block": ("xlam", '```json\n[{"name": "Paris", "arguments": {}}]\n```'),
    "a name in tags": ("glm45", "Say <tool_call>hello</tool_call>. "),
    "a tag of a name": ("qwen3_coder", "Write <function=hello></function>. "),
    "other tags": ("minimax_m2", "<minimax:tool_call><call>hello</call></minimax:tool_call>"),
    "no harmony": ("openai", "all plain"),
    "a head without a message": ("openai", "<|channel|>final"),
    "white space": ("hermes", " \n "),
}


@pytest.mark.parametrize(("tools", "text", "content", "calls"), TEXTS.values(), ids=TEXTS)
def test_calls(tools, text, content, calls):
    expected = ("", content, calls)
    assert parsed(of(tools), [text]) == expected
    assert parsed(of(tools), list(text)) == expected


@pytest.mark.parametrize(("tools", "text"), CONTENT.values(), ids=CONTENT)
def test_text_without_calls_is_content(tools, text):
    assert parsed(of(tools), [text]) == parsed(of(tools), list(text)) == ("", text, [])


LIKE_TEXT = [f"{name} 0" for name in ("llama3_json", "xlam", "pythonic", "phi4_mini_json")]
"""Forms whose beginning may also be an answer: JSON, or a word."""


def is_beginning(said: str, whole: str, may_have_one: bool = True) -> bool:
    """Tell whether `said` begins `whole`, apart from white space and a mark's first character."""
    one_less = said[:-1] if may_have_one and said[-1:] in "<[`" else said
    return any(whole.startswith(text.strip()) for text in (said, one_less))


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [each for name, each in TEXTS.items() if name not in LIKE_TEXT],
    ids=[name for name in TEXTS if name not in LIKE_TEXT],
)
def test_an_answer_cut_anywhere_has_no_part_of_a_mark(tools, text, content, calls):
    """Nor may it have a part of a call whose name is still unknown."""
    for cut in range(len(text)):
        for pieces in ([text[:cut]], [text[at : min(at + 9, cut)] for at in range(0, cut, 9)]):
            _, said, called = parsed(of(tools), pieces, is_cut=True)
            assert is_beginning(said, content, not called), text[:cut]
            for (name, arguments), (whole_name, whole) in zip(called, calls, strict=False):
                assert name == whole_name and whole.startswith(arguments), text[:cut]


@pytest.mark.parametrize("name", [name for name, (_, _, content, _) in TEXTS.items() if not content])
def test_a_required_call_cut_anywhere_leaves_no_content(name):
    tools, text, _, _ = TEXTS[name]
    for cut in range(len(text)):
        assert parsed(of(tools, must_call=True), [text[:cut]], is_cut=True)[1] == "", text[:cut]


THOUGHTS = {
    "think": ("qwen3", False, "<think>\nHm, a < b.\n</think>\n\nYes."),
    "open": ("qwen3", True, "\nHm, a < b.\n</think>\n\nYes."),
    "hunyuan": ("hunyuan_a13b", False, "<think>\nHm, a < b.\n</think>\n<answer>\nYes.\n</answer>"),
    "mistral": ("mistral", False, "[THINK]Hm, a < b.[/THINK]Yes."),
    "gemma": ("gemma4", False, "<|channel>thought\nHm, a < b.\n<channel|>Yes."),
    "harmony": (
        "openai_gptoss",
        False,
        "<|channel|>analysis<|message|>Hm, a < b.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
    ),
}


@pytest.mark.parametrize(("reasoning", "is_open", "text"), THOUGHTS.values(), ids=THOUGHTS)
def test_thinking_cut_anywhere_has_no_part_of_a_mark(reasoning, is_open, text):
    for cut in range(len(text)):
        for pieces in ([text[:cut]], list(text[:cut])):
            thought, said, _ = parsed(of(None, reasoning, is_open), pieces, is_cut=True)
            assert is_beginning(thought, "Hm, a < b.") and is_beginning(said, "Yes."), text[:cut]


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "if a <"),
        ("hermes", "<table><"),
        ("hermes", "a <tool> b"),
        ("mistral", "a["),
        ("llama3_json", '{"name": "add", "par'),
        ("openai", "all plain"),
        ("openai", "assistant"),
    ],
)
def test_text_that_is_cut_off_is_kept(tools, text):
    assert (
        parsed(of(tools), [text], is_cut=True) == parsed(of(tools), list(text), is_cut=True) == ("", text, [])
    )


def test_a_phrase_that_begins_like_a_mark_is_kept():
    for text in ("Here is my", "H"):
        assert parsed(of(None, "granite"), [text], is_cut=True) == ("", text, [])
        assert parsed(of(None, "granite", True), [text], is_cut=True) == (text, "", [])


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("name", "marks"), [("qwen3", THINK), ("granite", GRANITE)], ids=["think", "granite"]
)
def test_reasoning_before_calls(name, marks, is_open):
    begin = "" if is_open else marks.open[-1]
    text = f"{begin}\nA < B, so\n{marks.close[-1]}\n\n{HERMES}"
    for pieces in ([text], list(text)):
        assert parsed(of("hermes", name, is_open), pieces) == ("A < B, so", "I look.", CALLS)


def test_a_frame_around_the_answer_is_left_out():
    """A frame around calls is dropped, but not one within their arguments."""
    call = '{"name": "add", "arguments": {"a": "<answer>"}}'
    text = f"<think>Hm.</think>\n<answer>\nI look.\n<tool_calls>[{call}]</tool_calls>\n</answer>"
    for pieces in ([text], list(text)):
        expected = ("Hm.", "I look.", [("add", '{"a": "<answer>"}')])
        assert parsed(of("hunyuan_a13b", "hunyuan_a13b"), pieces) == expected
        assert parsed(of(None, "hunyuan_a13b"), ["<answer>\nYes.\n</answer>"]) == ("", "Yes.", [])
    assert parsed(of(None, "qwen3"), ["<answer>"]) == ("", "<answer>", [])


def test_without_reasoning_all_is_content():
    assert parsed(of(None, "deepseek_r1"), [" Hello </think>"]) == ("", " Hello </think>", [])
    assert parsed(of(None, "deepseek_r1"), ["<think>cut o"]) == ("cut o", "", [])


def test_a_prompt_that_ends_within_the_reasoning_is_recognized():
    assert THINK.are_open("<|assistant|><think>\n", None)
    assert not THINK.are_open("<think>\n\n</think>\n\n", None)
    assert THINK.are_open("", "<think>so far")
    assert not THINK.are_open("<think>", "<think>so</think> far")


def test_content_is_sent_as_soon_as_it_is_certain():
    parser = AnswerParser(of("hermes"))
    assert [parser.push(piece) for piece in ["if a ", "<", " b", "<tool", "box>"]] == [
        [Content("if a")],
        [],
        [Content(" < b")],
        [],
        [Content("<toolbox>")],
    ]


def test_arguments_are_sent_as_they_come():
    parser = AnswerParser(of("hermes"))
    assert parser.push('<tool_call>{"name": "add", "arguments": ') == []
    assert parser.push('{"a"') == [
        CallStart("add"),
        Arguments("{"),
        Arguments('"'),
        Arguments("a"),
        Arguments('"'),
    ]
    assert parser.push(": 12") == [Arguments(": 12")]


def test_a_tagged_string_is_sent_as_it_comes():
    parser = AnswerParser(of("qwen3_coder"))

    def pushed(text: str) -> list[str]:
        return [part.text for part in parser.push(text) if isinstance(part, Arguments)]

    assert pushed("<tool_call>\n<function=get_weather>\n<parameter=city>\n") == ["{", '"city": ', '"']
    assert [pushed(text) for text in ("Pa", 'r"is', "\n", "</", "b>")] == [
        ["Pa"],
        ['r\\"is'],
        [],
        [],
        ["\\n</b>"],
    ]
    assert pushed("\n</parameter>\n<parameter=days>\n[1,") == ['"', ', "days": ']
    assert pushed(" 2]\n</parameter>") == ["[1, 2]"] and pushed("\n</function>") == ["}"]


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        (" 5\n", ["integer"], "5"),
        ("+5", ["integer", "string"], "5"),
        ("5.0", ["integer"], "5.0"),
        ("five ", ["integer"], '"five "'),
        ("-.5", ["number"], "-0.5"),
        ("12345678901234567890.10", ["number"], "12345678901234567890.10"),
        ("1e999", ["number"], '"1e999"'),
        ("NaN", ["number", "object"], '"NaN"'),
        ("True", ["boolean"], "true"),
        ("0", ["boolean"], "false"),
        ("null", ["null", "string"], "null"),
        ("None", ["null", "string"], '"None"'),
        ("None", ["null", "integer"], "null"),
        ("null", ["string"], '"null"'),
        ('{"a": [1, {}]}', ["object"], '{"a": [1, {}]}'),
        ("{'a': 1}", ["object"], "\"{'a': 1}\""),
        ("[1]", ["array", "string"], "[1]"),
        ('"é"', ["array", "string"], '"\\"é\\""'),
        ("[" * 100_000, ["array"], json.dumps("[" * 100_000)),
        ("9" * 5000, ["integer"], f'"{"9" * 5000}"'),
    ],
)
def test_a_text_between_tags_becomes_json_of_its_type(text, types, expected):
    assert as_json(text, types) == expected


ENDLESS = {"anyOf": [{"$ref": "#/$defs/A"}] * 9 + [{"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, ["string"]),
        (True, ["string"]),
        ({"type": ["integer", "null"]}, ["integer", "null"]),
        ({"enum": ["a", 1, None, 0.5, False]}, ["boolean", "integer", "null", "number", "string"]),
        ({"const": {}}, ["object"]),
        ({"oneOf": [{"type": "array"}, {"allOf": [{"$ref": "#/$defs/B~1"}]}]}, ["array", "boolean"]),
        ({"$ref": "#/$defs/A"}, ["null"]),
        ({"$ref": "#/$defs/missing"}, ["string"]),
        ({"$ref": "elsewhere", "type": 5, "enum": 5, "anyOf": 5}, ["string"]),
    ],
)
def test_types_of_parameters(schema, types):
    defs = {"A": ENDLESS, "B/": {"type": "boolean"}}
    assert [*parameters_of({"properties": {"p": schema}, "$defs": defs}).of("p")] == types
    others = {"$ref": "#/$defs/f", "$defs": {**defs, "f": {"additionalProperties": schema}}}
    assert [*parameters_of(others).of("p")] == (["string"] if schema is True else types)


FRAGMENTS = [
    *[tag for tags in TAGS.values() for tag in (tags.call, f"{tags.key}a{tags.key_end}", tags.value_end)],
    *[word for each in TOOL_FORMATS.values() for word in each.markers],
    *["<think>", "</think>", "</tool_call>", '{"name": "add"', ', "arguments": ', ADD, PARIS, " ", "\n"],
    *"}][;)<'\"\\é🙂",
    *["a=", "a:", "True", "add", "function", "```json", "analysis", "final"],
    *["to=functions.add", "functions.add:0", "call:add{", "[add("],
]
TEXT = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=12).map("".join)
WHOLE = st.sampled_from([text for _, text, *_ in [*TEXTS.values(), *CONTENT.values()]])


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([None, *TOOL_FORMATS]),
    st.sampled_from([None, *REASONING_FORMATS]),
    st.booleans(),
    st.one_of(TEXT, st.builds(str.__add__, WHOLE, TEXT), st.builds(str.__add__, TEXT, WHOLE)),
    st.data(),
)
def test_any_split_gives_the_same(tools, reasoning, is_open, text, data):
    parsing = of(tools, reasoning, is_open)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for is_cut in (False, True):
        whole = parsed(parsing, [text], is_cut)
        assert parsed(parsing, pieces, is_cut) == whole
        assert parsed(parsing, list(text), is_cut) == whole


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<tool_call>{\"name\": ' }} {{ '<think>' }} {{ '</think>' }}", "hermes", "deepseek_r1"),
        ("{{ '<|channel|>' }} {{ '<tool_call>' }}", "openai", "openai_gptoss"),
        ("<|im_system|>tool_declare<|im_middle|>", "kimi_k2", None),
        ("<tool_call>f<tool_sep>\n<arg_key>k</arg_key>\n<arg_value> </think>", "hy_v3", "deepseek_r1"),
        ("Answer in a block:\\n```json\\n", None, None),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("<|tool_call|> Here is my thought process: x", "granite", "granite"),
        ("<|python_tag|>", "llama3_json", None),
        ('<tool_call><function=f>{"name": ', None, None),
        ("<tool_call>f<arg_key>{{ k }}</arg_key>{{ space }}<arg_value>", None, None),
        ("<tool_call>\n<function=f>\n<parameter=k>{{ space }}", None, None),
        ("<seed:tool_call>\n<function=f>\n<parameter=k>\n", None, None),
        ("]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=", None, None),
        ("{{ messages }}", None, None),
    ],
)
def test_formats_by_the_template(template, tools, reasoning):
    assert tool_format("auto", template) is (TOOL_FORMATS[tools] if tools else None)
    found = reasoning_format("auto", template)
    assert found == (REASONING_FORMATS[reasoning] if reasoning else None)
    assert tool_format("none", template) is reasoning_format("none", template) is None
    assert tool_format("hermes", template) is TOOL_FORMATS["hermes"]


SAID = " \u2003yes\n \u3000"


@pytest.mark.parametrize(
    ("reasoning", "thought"),
    [
        (None, ""),
        ("qwen3", "<think>\nHm.\n</think>\n\n"),
        ("granite", "Here is my thought process: Hm.\n\nHere is my response: "),
        ("mistral", "[THINK]Hm.[/THINK]"),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>"),
        ("openai_gptoss", HARMONY.open[0] + "Hm." + HARMONY.close[0] + HARMONY.lead),
    ],
)
def test_an_answer_of_a_grammar_keeps_its_white_space(reasoning, thought):
    parsing = msgspec.structs.replace(of(None, reasoning), is_exact=True)
    wanted = ("Hm." if thought else "", SAID, [])
    for pieces in ([thought + SAID], list(thought + SAID)):
        assert parsed(parsing, pieces) == wanted
    if reasoning != "openai_gptoss":
        assert parsed(parsing, list(SAID)) == ("", SAID, [])


def test_white_space_that_json_does_not_have_begins_no_call():
    text = f'\u2003{{"name": "add", "parameters": {ADD}}}'
    assert parsed(of("llama3_json"), list(text)) == ("", text, [])
    assert parsed(of("llama3_json"), list(text.replace("\u2003", "\n "))) == ("", "", [("add", ADD)])
