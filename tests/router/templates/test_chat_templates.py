"""Templates of real models: which parsers they select, and that the calls which they write can be parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from protocol.errors import InvalidRequestError
from router.grammars.tool_grammar import OfferedFunction, tool_grammar
from router.openai_types import CalledFunction, ChatMessage, ToolCall
from router.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Parsing,
    name_of,
    reasoning_format,
    tool_format,
)
from router.parsing.parameters import parameters_of
from router.text.chat_template import ChatTemplate, plain_messages
from tests.router.grammars.test_tool_grammar import model_of
from tests.router.parsing.test_parsing import parsed

FOLDER = Path(__file__).parent / "chat_templates"
CALLS = [("get_weather", '{"city": "Paris \\"ô\\" {[", "days": [1, null]}'), ("add", '{"a": 1, "b": -2.5}')]
SCHEMAS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array"}}},
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTION = "Is it raining?"


class Expected(NamedTuple):
    tools: str
    reasoning: str | None
    begins: str
    """How the model begins a call."""
    ends: str
    """How the template ends an answer."""
    most_calls: int = 2
    """The most calls of an answer. With 0 the template leaves calls out."""


MODELS = {
    "qwen2.5": Expected("hermes", None, "<tool_call>", "<|im_end|>\n"),
    "qwen3": Expected("hermes", "deepseek_r1", "<tool_call>", "<|im_end|>\n"),
    "llama-3.1": Expected("llama3_json", None, '{"name": "get_weather"', "<|eot_id|>", 1),
    "mistral-nemo": Expected("mistral", None, "[TOOL_CALLS]", "</s>"),
    "granite-3.3": Expected("granite", "deepseek_r1", "<|tool_call|>", "<|end_of_text|>\n", 0),
    "granite-4.0": Expected("hermes", None, "<tool_call>", "<|end_of_text|>\n"),
    "deepseek-v3.1": Expected(
        "deepseek_v31", "deepseek_r1", "<｜tool▁calls▁begin｜>", "<｜end▁of▁sentence｜>"
    ),
    "deepseek-r1-distill": Expected(
        "deepseek_v3", "deepseek_r1", "<｜tool▁calls▁begin｜>", "<｜end▁of▁sentence｜>"
    ),
    "tags-qwen3_coder": Expected("qwen3_coder", "deepseek_r1", "<tool_call>", "<|im_end|>\n"),
    "tags-mimo": Expected("mimo", "deepseek_r1", "<tool_call>", "<|im_end|>"),
    "tags-glm45": Expected("glm45", "deepseek_r1", "<tool_call>", ""),
    "tags-glm47": Expected("glm47", "deepseek_r1", "<tool_call>", ""),
    "tags-minimax_m2": Expected("minimax_m2", "deepseek_r1", "<minimax:tool_call>", "[e~[\n"),
    "tags-deepseek_v32": Expected(
        "deepseek_v32", "deepseek_r1", "<｜DSML｜function_calls>", "<｜end▁of▁sentence｜>"
    ),
    "tags-deepseek_v4": Expected(
        "deepseek_v4", "deepseek_r1", "<｜DSML｜tool_calls>", "<｜end▁of▁sentence｜>"
    ),
    "tags-hy_v3": Expected("hy_v3", "hy_v3", "<tool_calls:opensource>", "<|hy_eos|>"),
    "calls-kimi_k2": Expected("kimi_k2", "deepseek_r1", "<|tool_calls_section_begin|>", "<|im_end|>"),
    "calls-gemma4": Expected("gemma4", "gemma4", "<|tool_call>", "<turn|>\n"),
    "calls-hunyuan_a13b": Expected("hunyuan_a13b", "hunyuan_a13b", "<tool_calls>", "<|eos|>"),
    "calls-internlm": Expected("internlm", None, "<|action_start|>", "<|im_end|>\n"),
    "calls-phi4_mini_json": Expected("phi4_mini_json", None, "functools[", "<|end|>"),
    "calls-pythonic": Expected("pythonic", None, "[", "<|eot|>"),
    "calls-xlam": Expected("xlam", None, "[", "<|im_end|>\n"),
    "gpt-oss": Expected("openai", "openai_gptoss", " to=functions.get_weather", "", 1),
}


TAGGED = [name for name in MODELS if name.startswith("tags-")]
OUR_OWN = [*TAGGED, *(name for name in MODELS if name.startswith("calls-"))]


def source_of(name: str) -> str:
    if name == "tags-deepseek_v4":
        return source_of("tags-deepseek_v32").replace("function_calls", "tool_calls")
    return (FOLDER / f"{name}.jinja").read_text()


def template(name: str) -> ChatTemplate:
    return ChatTemplate(source_of(name), {"bos_token": "<s>", "eos_token": "</s>"})


def messages(num_calls: int, content: str | None, thought: str | None = None) -> list[dict]:
    calls = [
        ToolCall(id=f"abcdefgh{index}", function=CalledFunction(name=name, arguments=arguments))
        for index, (name, arguments) in enumerate(CALLS[:num_calls])
    ]
    said = ChatMessage(role="assistant", content=content, tool_calls=calls, reasoning_content=thought)
    return plain_messages([ChatMessage(role="user", content=QUESTION), said])


def parsing(source: str, prompt: str = "") -> Parsing:
    """Return the parsing of a request with `TOOLS`."""
    tools, reasoning = tool_format("auto", source), reasoning_format("auto", source)
    marks = None if reasoning is None else reasoning.marks
    return Parsing(
        tools=None if tools is None else name_of(tools),
        known={name: parameters_of(schema) for name, schema in SCHEMAS.items()},
        is_harmony=tools is not None and tools.is_harmony,
        marks=marks,
        is_open=marks is not None and marks.are_open(prompt, None),
    )


def test_each_template_is_listed():
    assert {path.stem for path in FOLDER.glob("*.jinja")} == MODELS.keys() - {"tags-deepseek_v4"}


@pytest.mark.parametrize("name", MODELS)
def test_the_template_selects_the_parsers(name):
    expected, source = MODELS[name], template(name).source
    assert tool_format("auto", source) is TOOL_FORMATS[expected.tools]
    reasoning = None if expected.reasoning is None else REASONING_FORMATS[expected.reasoning]
    assert reasoning_format("auto", source) == reasoning


def answer_with(name: str, num_calls: int) -> tuple[str, Parsing]:
    """Return the text with which the model makes calls, as its template writes them, and the parsed result.

    Answers have a null content beside calls, but some templates want text there and others none.
    """
    expected, written = MODELS[name], template(name)
    prompt = written.render(messages(1, None)[:1], variables={"tools": TOOLS})
    chat = written.render(messages(num_calls, None), add_generation_prompt=False, variables={"tools": TOOLS})
    begin = chat.index(expected.begins, chat.rindex(QUESTION))
    end = chat.rindex(expected.ends) if chat.endswith(expected.ends) else len(chat)
    parser = parsing(written.source, prompt)
    thought = f"Hm.{parser.marks.end}" if parser.is_open and parser.marks is not None else ""
    return thought + chat[begin:end], parser


@pytest.mark.parametrize(
    ("name", "num_calls"),
    [(name, number) for name, expected in MODELS.items() for number in range(1, expected.most_calls + 1)],
)
def test_calls_written_by_the_template_are_parsed(name, num_calls):
    said, parser = answer_with(name, num_calls)
    thought, content, calls = parsed(parser, [said])
    assert (thought, content) == ("Hm." if parser.is_open else "", "")
    assert [(called, json.loads(arguments)) for called, arguments in calls] == [
        (called, json.loads(arguments)) for called, arguments in CALLS[:num_calls]
    ]


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "granite-4.0", "deepseek-v3.1", *OUR_OWN])
def test_a_required_call_is_written_as_by_the_template(name, num_calls):
    """The texts are equal, but for Mistral's and gpt-oss' past calls, which templates write differently."""
    said, parser = answer_with(name, num_calls)
    assert parser.tools is not None
    model = model_of(False)
    offers = [OfferedFunction(called, schema, True) for called, schema in SCHEMAS.items()]
    grammar = tool_grammar(
        TOOL_FORMATS[parser.tools].form(template(name).source),
        offers,
        model.spelling,
        demanded=True,
        several=True,
        marks=parser.marks,
        is_open=parser.is_open,
    )
    assert model.takes(grammar, said) and not model.takes(grammar, said[:-2])


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_with_a_call_continues(name):
    """The client sends the answer's message back unchanged, then the result."""
    chat = [
        *messages(1, None),
        {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefgh0", "content": "rain"},
    ]
    prompt = template(name).render(chat, variables={"tools": TOOLS})
    assert prompt.rindex("rain") > prompt.index(QUESTION)
    if name in OUR_OWN:
        said, _ = answer_with(name, 1)
        assert said.removeprefix("Hm.\n</think>\n\n") in prompt


def test_reasoning_written_by_the_template_is_parsed():
    qwen = template("qwen3")
    chat = qwen.render(messages(1, "I look.", "Hm."), add_generation_prompt=False, variables={"tools": TOOLS})
    said = chat[chat.index("<think>", chat.rindex(QUESTION)) : chat.rindex("<|im_end|>")]
    assert parsed(parsing(qwen.source), [said]) == ("Hm.", "I look.", CALLS[:1])


def test_a_templates_refusal_names_the_messages():
    with pytest.raises(InvalidRequestError, match="single tool-calls"):
        template("llama-3.1").render(messages(2, None), variables={"tools": TOOLS})
