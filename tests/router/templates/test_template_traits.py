"""Templates show content parts, results, and arguments of calls that any server sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.errors import InvalidRequestError
from router.openai_types import MAX_ARGUMENT_BYTES
from router.text.chat_template import CallArguments, ChatTemplate, call_arguments
from tests.router.templates.test_chat_templates import MODELS, template

TEXT = [{"type": "text", "text": "Where is Rome?"}]
TWO = [*TEXT, {"type": "text", "text": "And Pisa?"}]
PARTS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)
PARTS_OF_USERS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{{ m.content[0]['text'] if m.role == 'user' else m.content + '' }}{% endfor %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ALL = {"system", "user", "assistant", "tool"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "f", "arguments": call_arguments("{}", "")},
        }
    ],
}


def of(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


def says(role: str, content: object) -> dict:
    return {"role": role, "content": content}


@pytest.mark.parametrize("content", ["Where is Rome?", TEXT])
@pytest.mark.parametrize("source", [PARTS, PARTS_OF_USERS, PLAIN])
def test_every_content_shape_shows_the_text(source, content):
    chat = [says("system", "Be brief."), says("user", content), says("assistant", "Italy.")]
    shown = of(source).render(chat)
    assert shown == "[system]Be brief.[user]Where is Rome?[assistant]Italy."


def test_several_parts_become_lines_for_templates_of_text():
    chat = [says("user", TWO)]
    assert of(PLAIN).render(chat) == "[user]Where is Rome?\nAnd Pisa?"
    assert of(PARTS).render(chat) == "[user]Where is Rome?And Pisa?", "the template puts them together"


def test_calls_and_results_in_parts():
    chat = [says("user", "x"), CALL, {**says("tool", "rain"), "tool_call_id": "abcdefghi", "name": "f"}]
    assert of(PARTS).render(chat) == "[user]x[assistant]f{}[tool]rain"


@pytest.mark.parametrize("content", ["The fox", [{"type": "text", "text": "The fox"}]])
@pytest.mark.parametrize("source", [PARTS, PLAIN])
def test_a_message_is_continued(source, content):
    chat = [says("user", "x"), says("assistant", content)]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert of(source).render(chat, **options) == "[user]x[assistant]The fox"


def test_traits_are_detected():
    assert of(PARTS).traits.part_roles == ALL and of(PARTS_OF_USERS).traits.part_roles == {"user"}
    assert not of(PLAIN).traits.part_roles
    assert of(PLAIN).traits.shows_user and not of("nothing").traits.shows_user
    with_system_only = "{% if messages[0].role != 'system' %}{{ raise_exception('x') }}{% endif %}" + PLAIN
    assert of(with_system_only).traits.shows_user
    assert not of(PLAIN).traits.shows_tools
    assert of(PLAIN + "{% for t in tools %}{{ t.function.name }}{% endfor %}").traits.shows_tools


@pytest.mark.parametrize("name", MODELS)
def test_traits_of_published_templates(name):
    traits = template(name).traits
    assert not traits.part_roles and traits.shows_user
    assert traits.shows_tools == (not name.startswith("deepseek")), "tools are the system message's there"
    assert traits.several_calls == (MODELS[name].most_calls != 1)
    assert traits.thought == ("thinking" if name == "gpt-oss" else "reasoning_content")


def test_call_ids_contain_names_for_templates_that_show_ids():
    """Other servers' and earlier calls' ids are replaced, in the results too."""
    kept = {**CALL["tool_calls"][0], "id": "functions.f:7"}
    results = [{**says("tool", "rain"), "tool_call_id": each} for each in ("abcdefghi", "functions.f:7")]
    chat = [says("user", "x"), {**CALL, "tool_calls": [*CALL["tool_calls"], kept]}, *results]
    written = template("calls-kimi_k2")
    assert written.traits.named_ids and not template("calls-gemma4").traits.named_ids
    shown = written.render(chat)
    assert [shown.count(text) for text in ("functions.f:0", "functions.f:7", "abcdefghi")] == [2, 2, 0]


def test_thoughts_between_calls_are_shown_to_gpt_oss():
    written = template("gpt-oss")
    thinking = {**CALL, "reasoning_content": "Hm."}
    result = {**says("tool", "rain"), "tool_call_id": "abcdefghi", "name": "f"}
    shown = written.render([says("user", "x"), thinking, result])
    assert "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f" in shown
    both = written.render([says("user", "x"), {**thinking, "content": "I look."}, result])
    assert "I look." in both, "it refuses both"


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
