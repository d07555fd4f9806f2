"""The content shapes and features that chat templates need or show are detected."""

from __future__ import annotations

from typing import Any

import pytest

from router.text.chat_template import ChatTemplate, call_arguments
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
