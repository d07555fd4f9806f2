"""`/v1/messages`, called by the `anthropic` client, which checks every field and event by its types."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from router.openai_types import MAX_ARGUMENT_BYTES
from tests.router.scripted import HERMES, NOW, PARIS, WEATHER, Scripted

TOOLS = [
    {
        "name": "get_weather",
        "description": "Tells the weather.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
    {"name": "now", "input_schema": {"type": "object"}},
]
QUESTION = "Is it raining?"
ASK = {"role": "user", "content": QUESTION}
SAYS = f"<think>\nHm.\n</think>\n\nI look.\n{WEATHER}\n{NOW}"
ARGUMENTS = json.loads(PARIS)


@pytest.fixture(scope="module")
def client(hermes):
    with client_of(hermes) as client:
        yield client


def client_of(scripted: Scripted, **options) -> anthropic.Anthropic:
    """Return a client that refuses whatever does not fit Anthropic's types."""
    options = {"api_key": "any", "max_retries": 0, **options}
    return anthropic.Anthropic(base_url=scripted.router.url, _strict_response_validation=True, **options)


def asked(hermes: Scripted, says: str, messages: list | None = None, **options) -> dict:
    hermes.says = says
    named = {"model": hermes.router.server.config.model_name, "max_tokens": 150}
    return {**named, "messages": messages or [ASK], **options}


def test_reasoning_text_and_tools_whole_and_streamed(client, hermes):
    options = asked(hermes, SAYS, tools=TOOLS, system=[{"type": "text", "text": "Be short."}])
    answer = client.messages.create(**options)
    assert hermes.prompt.endswith(f"<system>Be short.\n<user>{QUESTION}\n<assistant>")
    assert '"name": "get_weather"' in hermes.prompt
    thought, said, weather, now = answer.content
    assert (thought.type, thought.thinking, said.type, said.text) == ("thinking", "Hm.", "text", "I look.")
    assert (weather.type, weather.name, weather.input) == ("tool_use", "get_weather", ARGUMENTS)
    assert (now.name, now.input) == ("now", {}) and weather.id != now.id
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("tool_use", None, "assistant")
    assert answer.usage.output_tokens == len(hermes.tokenizer.encode(SAYS, add_special_tokens=False)) + 1
    events = list(client.messages.create(**options, stream=True))
    assert [event.type for event in events if "block" not in event.type] == [
        *("message_start", "message_delta", "message_stop")
    ]
    assert events[0].message.usage.input_tokens == answer.usage.input_tokens
    with client.messages.stream(**options) as stream:
        put_together = stream.get_final_message()
    bare = {"id", "content"}
    assert put_together.model_dump(exclude=bare) == answer.model_dump(exclude=bare)
    assert [block.type for block in put_together.content] == [block.type for block in answer.content]
    assert put_together.content[2].input == ARGUMENTS and put_together.content[0].signature


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("says", "options", "reason", "text"),
    [
        ("No.", {}, "end_turn", "No."),
        ("It is not raining.", {"max_tokens": 2}, "max_tokens", None),
        ("No. Yes.", {"stop_sequences": ["Yes"]}, "stop_sequence", "No. "),
    ],
)
def test_stop_reasons(client, hermes, stream, says, options, reason, text):
    options = asked(hermes, says, **options)
    if stream:
        with client.messages.stream(**options) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**options)
    assert answer.stop_reason == reason and text in (None, answer.content[0].text)
    assert answer.stop_sequence == ("Yes" if reason == "stop_sequence" else None)


def test_a_conversation_with_tools(client, hermes):
    """The answer's blocks are sent back unchanged, with the tools' results."""
    first = client.messages.create(**asked(hermes, SAYS, tools=TOOLS))
    uses = [block.id for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": uses[0], "content": "rain", "is_error": False},
        {"type": "tool_result", "tool_use_id": uses[1], "content": [{"type": "text", "text": "noon"}]},
        {"type": "text", "text": "So?"},
    ]
    messages = [ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    options = asked(hermes, "Yes.", messages, tools=TOOLS)
    assert client.messages.create(**options).content[0].text == "Yes."
    said = f"<assistant>Hm.I look.<tool_call>{PARIS}</tool_call><tool_call>{{}}</tool_call>\n"
    shown = f"<user>{QUESTION}\n{said}<tool>rain\n<tool>noon\n<user>So?\n<assistant>"
    assert hermes.prompt.partition("]")[2] == shown
    del options["max_tokens"]
    counted = client.messages.count_tokens(**options).input_tokens
    assert counted == len(hermes.worker.generated[-1].prompt_token_ids)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ({}, ""),
        ({"content": "no net"}, "no net"),
        ({"content": [{"type": "text", "text": "no net"}]}, "no net"),
    ],
)
def test_a_tools_error_reaches_the_model(hermes, content, shown):
    result = {**RESULT, "is_error": True, **content}
    messages = [*said(USE, role="assistant"), *said(result)[1:]]
    assert hermes.router.http.post("/v1/messages", json=asked(hermes, "No.", messages)).status_code == 200
    assert f"<tool>Error: {shown}\n" in hermes.prompt or f"'text': 'Error: {shown}'" in hermes.prompt


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses"])
def test_ignored_nested_fields_are_named(hermes, path):
    """Each is named once. Fields that no model sees, or without a value, are left out."""
    unseen = {"cache_control": {"type": "ephemeral"}, "citations": [1], "note": None, "parts": []}
    kind = "input_text" if path == "/v1/responses" else "text"
    message = {"role": "user", "content": [{"type": kind, "text": "x", "mood": "sad", **unseen}], "weight": 2}
    tool: dict[str, Any] = {
        "name": "f",
        "input_schema": {"type": "object", "mood": 1},
        "examples": [1],
        **unseen,
    }
    if path == "/v1/chat/completions":
        tool = {"type": "function", "function": {"name": "f", "examples": [1], **unseen}}
    elif path == "/v1/responses":
        tool = {"type": "function", "name": "f", "examples": [1], **unseen}
    field = "input" if path == "/v1/responses" else "messages"
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {field: [message, message], limit: 20, "tools": [tool], "a\n": 1}
    answer = hermes.router.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    function = "tools[0].function" if path == "/v1/chat/completions" else "tools[0]"
    named = [f"{field}[0].content[0].mood", f"{field}[0].weight", f"{function}.examples", "a?"]
    assert answer.headers["x-tandem-ignored-fields"].split(", ") == named


def test_a_partial_answer_is_continued(client, hermes):
    messages = [ASK, {"role": "assistant", "content": "It"}]
    assert client.messages.create(**asked(hermes, " is.", messages)).content[0].text == " is."
    assert hermes.prompt == f"<user>{QUESTION}\n<assistant>It"


def test_a_clients_billing_header_keeps_the_prefix(client, hermes):
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: a=1"},
        {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}},
    ]
    client.messages.create(**asked(hermes, "No.", system=system))
    assert hermes.prompt.startswith("<system>Be short.")


@pytest.mark.parametrize(
    ("thinking", "end", "budget"),
    [({"type": "enabled", "budget_tokens": 64}, "", 64), ({"type": "disabled"}, "<think></think>", None)],
)
def test_thinking(client, hermes, monkeypatch, thinking, end, budget):
    chats, budgets = hermes.router.server.state.chats, []
    read = chats.read
    monkeypatch.setattr(chats, "read", lambda body: budgets.append(body.thinking_token_budget) or read(body))
    client.messages.create(**asked(hermes, "No.", thinking=thinking))
    assert hermes.prompt.endswith(f"<assistant>{end}") and budgets == [budget]


@pytest.mark.parametrize(
    ("options", "has_grammar"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, True),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "now"}}, True),
        ({"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, False),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, True),
    ],
)
def test_a_required_tool_is_a_grammar(client, hermes, options, has_grammar):
    answer = client.messages.create(**asked(hermes, f"{NOW}\n{NOW}", **options))
    assert bool(hermes.worker.generated[-1].sampling.grammar) == has_grammar
    if "tools" in options:
        assert [block.name for block in answer.content] == ["now"], "one at a time"


@pytest.mark.parametrize("stream", [False, True])
def test_truncated_arguments_are_closed(client, hermes, stream):
    room = len(hermes.tokenizer.encode(WEATHER[: WEATHER.index("ris")], add_special_tokens=False))
    options = asked(hermes, WEATHER, tools=TOOLS, max_tokens=room)
    if stream:
        with client.messages.stream(**options) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**options)
        assert answer.content[0].input["city"] in ("P", "Pa")
    assert answer.stop_reason == "max_tokens" and answer.content[0].type == "tool_use"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
USE = {"type": "tool_use", "id": "1", "name": "now", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1"}


def said(*blocks, role="user"):
    return [ASK, {"role": role, "content": list(blocks)}]


BAD = {
    "max_tokens": ({"max_tokens": None}, "max_tokens: is required"),
    "too many tokens": ({"max_tokens": 10**6}, "max_tokens"),
    "no messages": ({"messages": []}, "messages"),
    "an image": ({"messages": said(IMAGE)}, "messages[1].content[0].type: images are not supported"),
    "an image in a result": (
        {"messages": [*said(USE, role="assistant"), *said({**RESULT, "content": [IMAGE]})]},
        "messages[3].content[0].content[0].type",
    ),
    "a result of no use": (
        {"messages": said({"type": "text", "text": "x"}, RESULT)},
        "messages[1].content[1].tool_use_id",
    ),
    "a use by the user": ({"messages": said(USE)}, "messages[1].content[0].type"),
    "a use without a name": (
        {"messages": said({"type": "tool_use", "id": "1"}, role="assistant")},
        "messages[1].content[0].name",
    ),
    "a role that is unknown": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    "arguments that are too large": (
        {"messages": said({**USE, "input": {"a": " " * MAX_ARGUMENT_BYTES}}, role="assistant")},
        "messages[1].content[0].input",
    ),
    "a system prompt of an image": ({"system": [{**IMAGE, "text": ""}]}, "system[0].type"),
    "a tool of the server": ({"tools": [*TOOLS, {"type": "web_search_1", "name": "x"}]}, "tools[2].type"),
    "a tool twice": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
    "a schema that is none": ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
    "a choice of no tool": ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
    "a choice without a name": ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "a choice that is unknown": ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice.type"),
    "thinking that is unknown": ({"thinking": {"type": "x"}}, "thinking.type"),
    "too hot": ({"temperature": 1.5}, "temperature: expected float <= 1.0"),
    "too cold": ({"temperature": -0.1}, "temperature: expected float >= 0.0"),
    "fewer than no choices": ({"top_k": -1}, "top_k: expected int >= 0"),
    "more than all": ({"top_p": 1.1}, "top_p: must be in (0, 1]"),
    "a budget of all tokens": (
        {"thinking": {"type": "enabled", "budget_tokens": 2}},
        "thinking.budget_tokens: must be less than max_tokens, 2; got 2",
    ),
    "a budget of nothing": ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    "a format that is unknown": ({"output_config": {"format": {"type": "x"}}}, "output_config.format.type"),
    "no schema": ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    "too long stops": ({"stop_sequences": ["x" * 1000] * 2}, "stop_sequences"),
    "stop": ({"stop": "x"}, "stop: is not supported; use stop_sequences"),
    "another server": ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    "another model": ({"model": "claude"}, "the model 'claude' does not exist"),
}


@pytest.mark.parametrize(("body", "message"), BAD.values(), ids=BAD)
def test_bad_input_names_the_field(hermes, body, message):
    answer = hermes.router.http.post("/v1/messages", json={"messages": [ASK], "max_tokens": 2, **body})
    found = answer.json()
    is_missing = "model" in body
    assert (answer.status_code, found["type"]) == (404 if is_missing else 400, "error")
    assert found["error"]["message"].startswith(message)
    assert found["error"]["type"] == ("not_found_error" if is_missing else "invalid_request_error")
    assert answer.headers["request-id"] == found["request_id"]


def test_a_failed_stream_ends_with_an_error(make_scripted):
    scripted = make_scripted("model", HERMES, request_timeout=2.5)
    scripted.worker.stall_after = 6
    with client_of(scripted) as client, pytest.raises(anthropic.APIStatusError, match="longer") as failed:
        list(client.messages.create(**asked(scripted, "No. " * 30), stream=True))
    assert failed.value.body["error"]["type"] == "timeout_error"


def test_keys_come_in_either_header(make_scripted):
    scripted = make_scripted("model", HERMES, api_key="secret")
    for key in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
        with client_of(scripted, **key) as client:
            assert client.messages.create(**asked(scripted, "No.")).content[0].text == "No."
    with client_of(scripted) as client, pytest.raises(anthropic.AuthenticationError) as refused:
        client.messages.create(**asked(scripted, "No."))
    assert refused.value.body["error"]["type"] == "authentication_error"
