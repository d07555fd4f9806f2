"""`/v1/responses`, called by the `openai` client, which checks every field and event by its types."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.errors import ApiError
from router.openai_types import MAX_ARGUMENT_BYTES
from router.responses.store import ResponseStore, StoredResponse
from tests.full_disk import full_disk
from tests.router.router_clients import openai_client
from tests.router.scripted import HERMES, NOW, PARIS, WEATHER, Scripted

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
QUESTION = "Is it raining?"
SAYS = f"<think>\nHm.\n</think>\n\nI look.\n{WEATHER}\n{NOW}"
KINDS = ["reasoning", "message", "function_call", "function_call"]


def client_of(scripted: Scripted, key: str = "any") -> openai.OpenAI:
    """Return a client that refuses whatever does not fit OpenAI's types."""
    return openai_client(scripted.router.url, key, _strict_response_validation=True)


@pytest.fixture(scope="module")
def client(hermes):
    with client_of(hermes) as client:
        yield client


def ask(client: openai.OpenAI, hermes: Scripted, says: str, asked=QUESTION, **options):
    hermes.says = says
    return client.responses.create(
        **{"model": hermes.router.server.config.model_name, "input": asked, **options}
    )


def test_text(client, hermes):
    answer = ask(client, hermes, "No.", instructions="Be short.", metadata={"a": "b"}, temperature=0.5)
    assert (answer.output_text, answer.status, answer.object) == ("No.", "completed", "response")
    assert hermes.prompt == f"<system>Be short.\n<user>{QUESTION}\n<assistant>"
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be short.", {"a": "b"}, 0.5)
    assert (answer.tools, answer.tool_choice, answer.parallel_tool_calls) == ([], "auto", True)
    usage, num_prompt = answer.usage, len(hermes.worker.generated[-1].prompt_token_ids)
    assert usage.input_tokens == num_prompt and usage.total_tokens == num_prompt + usage.output_tokens
    assert usage.output_tokens == len(hermes.tokenizer.encode("No.", add_special_tokens=False)) + 1


def test_reasoning_text_and_calls(client, hermes):
    answer = ask(client, hermes, SAYS, tools=TOOLS, reasoning={"effort": "low"})
    assert [item.type for item in answer.output] == KINDS
    assert all(item.status == "completed" for item in answer.output)
    thought, said, weather, now = answer.output
    assert thought.content[0].text == "Hm." and said.content[0].text == "I look."
    assert (weather.name, weather.arguments, now.name, now.arguments) == ("get_weather", PARIS, "now", "{}")
    assert len({item.id for item in answer.output}) == 4 and weather.call_id != now.call_id
    assert answer.usage.output_tokens_details.reasoning_tokens == len(hermes.tokenizer.encode("Hm."))
    assert '"name": "get_weather"' in hermes.prompt and answer.tools[0].name == "get_weather"


def test_events(client, hermes):
    events = list(ask(client, hermes, SAYS, tools=TOOLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"]
    assert types[-1] == "response.completed" and types.count("response.output_item.added") == 4
    final = events[-1].response
    assert events[0].response.id == final.id and events[0].response.status == "in_progress"
    for index, item in enumerate(final.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        first, *middle, last = mine
        assert (first.type, last.type) == ("response.output_item.added", "response.output_item.done")
        assert first.item.id == last.item.id == item.id and last.item == item
        told = "".join(event.delta for event in middle if event.type.endswith(".delta"))
        assert told == (item.arguments if item.type == "function_call" else item.content[0].text)
    whole = ask(client, hermes, SAYS, tools=TOOLS)
    assert [item.type for item in whole.output] == [item.type for item in final.output] == KINDS


class Weather(BaseModel):
    city: str


def test_the_clients_own_helpers(client, hermes):
    """They require strict functions and formats, and put the events together themselves."""
    tools = [openai.pydantic_function_tool(Weather, name="get_weather")]
    tools = [{"type": "function", **tool["function"]} for tool in tools]
    hermes.says = WEATHER
    asked = {"model": hermes.router.server.config.model_name, "input": QUESTION}
    (call,) = client.responses.parse(**asked, tools=tools).output
    assert call.parsed_arguments == {"city": "Paris 🙂"}
    assert hermes.worker.generated[-1].sampling.grammar
    with client.responses.stream(**asked, tools=tools) as stream:
        deltas = "".join(e.delta for e in stream if e.type == "response.function_call_arguments.delta")
        assert deltas == PARIS == stream.get_final_response().output[0].arguments
    hermes.says = PARIS
    answer = client.responses.parse(**asked, text_format=Weather)
    assert answer.output_parsed == Weather(city="Paris 🙂") and answer.text.format.name == "Weather"
    assert hermes.worker.generated[-1].sampling.grammar
    with client.responses.stream(**asked, text_format=Weather) as stream:
        assert stream.get_final_response().output_parsed == Weather(city="Paris 🙂")


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_off_response_is_incomplete(client, hermes, stream):
    room = len(hermes.tokenizer.encode(WEATHER)) - 12
    answer = ask(client, hermes, WEATHER, tools=TOOLS, max_output_tokens=room, stream=stream)
    if stream:
        last = list(answer)[-1]
        assert last.type == "response.incomplete"
        answer = last.response
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete" and PARIS.startswith(answer.output[0].arguments)
    following = ask(client, hermes, "Yes.", previous_response_id=answer.id)
    assert hermes.prompt == f"<user>{QUESTION}\n<user>{QUESTION}\n<assistant>", "half a call is no call"
    assert following.output_text == "Yes."


@pytest.mark.parametrize(("stream", "by_id"), [(False, True), (True, False)])
def test_a_truncated_call_is_accepted_back_with_its_output(client, hermes, stream, by_id):
    """Unchanged, by the id of its response or as an item."""
    room = len(hermes.tokenizer.encode(WEATHER[: WEATHER.index("ris")]))
    answer = ask(client, hermes, WEATHER, tools=TOOLS, max_output_tokens=room, stream=stream)
    answer = list(answer)[-1].response if stream else answer
    (call,) = answer.output
    with pytest.raises(ValueError, match="Unterminated"):
        json.loads(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "not run"}
    if by_id:
        ask(client, hermes, "Yes.", [result], previous_response_id=answer.id)
    else:
        ask(client, hermes, "Yes.", [{"role": "user", "content": QUESTION}, call.to_dict(), result])
    closed = json.dumps({"city": call.arguments.removeprefix('{"city": "')})
    shown = f"<assistant><tool_call>{closed}</tool_call>\n<tool>not run\n<assistant>"
    assert hermes.prompt == f"<user>{QUESTION}\n{shown}"


@pytest.mark.parametrize("by_id", [False, True])
def test_a_conversation(client, hermes, by_id):
    """By the previous response's id, or with all items: the prompt is the same."""
    first = ask(client, hermes, SAYS, tools=TOOLS, instructions="Not kept.")
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    now = {**result, "call_id": first.output[3].call_id, "output": [{"type": "input_text", "text": "noon"}]}
    if by_id:
        second = ask(client, hermes, "Yes.", [result, now], tools=TOOLS, previous_response_id=first.id)
        assert second.previous_response_id == first.id
    else:
        items = [{"role": "user", "content": QUESTION}, *first.to_dict()["output"], result, now]
        second = ask(client, hermes, "Yes.", items, tools=TOOLS)
    said = f"<assistant>Hm.I look.<tool_call>{PARIS}</tool_call><tool_call>{{}}</tool_call>\n"
    shown = f"<user>{QUESTION}\n{said}<tool>rain\n<tool>noon\n"
    assert hermes.prompt.partition("]")[2] == f"{shown}<assistant>"
    ask(client, hermes, "Noon.", "When?", previous_response_id=second.id)
    assert hermes.prompt == f"{shown}<assistant>Yes.\n<user>When?\n<assistant>"


def test_stored_responses(client, hermes):
    answer = ask(client, hermes, "No.")
    assert client.responses.retrieve(answer.id) == answer
    (streamed,) = [
        e.response for e in ask(client, hermes, "No.", stream=True) if e.type.endswith(".completed")
    ]
    assert client.responses.retrieve(streamed.id) == streamed
    client.responses.delete(answer.id)
    for gone in (lambda: client.responses.retrieve(answer.id), lambda: client.responses.delete(answer.id)):
        with pytest.raises(openai.NotFoundError):
            gone()
    kept_by_nobody = ask(client, hermes, "No.", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept_by_nobody.id)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, hermes, "No.", previous_response_id=answer.id)
    assert (refused.value.param, refused.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )


def test_input_items(client, hermes):
    """All that a response answered, with what it continues, in either order, page by page."""
    first = ask(client, hermes, SAYS, tools=TOOLS, instructions="Not kept.")
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "rain"}
    now = {**result, "call_id": first.output[3].call_id, "output": [{"type": "text", "text": "noon"}]}
    repeated = {"role": "user", "content": [{"type": "text", "text": "So?"}], "id": "mine"}
    asked = [result, now, repeated, repeated]
    second = ask(client, hermes, "Yes.", asked, tools=TOOLS, previous_response_id=first.id)
    items = list(client.responses.input_items.list(second.id, order="asc"))
    kinds = ["message", *KINDS, "function_call_output", "function_call_output", "message", "message"]
    assert [item.type for item in items] == kinds and {item.status for item in items} == {"completed"}
    assert (items[0].role, items[0].content[0].text) == ("user", QUESTION)
    assert (items[1].content[0].text, items[2].content[0].text) == ("Hm.", "I look.")
    assert (items[3].arguments, items[5].output) == (PARIS, "rain")
    assert items[6].output[0].text == "noon" and items[7].content == items[8].content
    assert len({item.id for item in items}) == len(items)
    assert list(client.responses.input_items.list(second.id, limit=2)) == items[::-1]
    (only,) = client.responses.input_items.list(first.id)
    assert only.content == items[0].content


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"limit": 101}, "limit"),
        ({"limit": 0}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "1"}, "after"),
    ],
)
def test_pages_of_input_items_that_cannot_be(client, hermes, options, field):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_items.list(ask(client, hermes, "No.").id, **options)
    assert refused.value.param == field


def test_a_complete_response_cannot_be_cancelled(client, hermes):
    with pytest.raises(openai.BadRequestError, match="only background responses can be cancelled"):
        client.responses.cancel(ask(client, hermes, "No.").id)


MESSAGE = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "1", "name": "now", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1"}
UNKNOWN = {"type": "object", "unevaluatedProperties": False}


def said(**part: str) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [part]}]}


def chosen(kind: str, name: str) -> dict[str, Any]:
    return {"tools": TOOLS, "tool_choice": {"type": kind, "name": name}}


def formatted(kind: str, **schema: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": kind, "name": "x", **schema}}}


BAD = {
    "no input": ({"input": None}, "input"),
    "empty input": ({"input": []}, "input"),
    "an item that is unknown": ({"input": [MESSAGE, {"type": "computer_call"}]}, "input[1].type"),
    "a role that is unknown": ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    "a message without content": ({"input": [{"role": "user"}]}, "input[0].content"),
    "an image": (said(type="input_image", image_url="x"), "input[0].content[0].type"),
    "a part without text": (said(type="input_text"), "input[0].content[0].text"),
    "an output of no call": (
        {"input": [MESSAGE, {**OUTPUT, "call_id": "7", "output": ""}]},
        "input[1].call_id",
    ),
    "a call's output without one": ({"input": [CALL, OUTPUT]}, "input[1].output"),
    "arguments that are too large": (
        {"input": [MESSAGE, {**CALL, "call_id": "0"}, {**CALL, "arguments": " " * (MAX_ARGUMENT_BYTES + 1)}]},
        "input[2].arguments",
    ),
    "a call without a name": ({"input": [{**CALL, "name": None}]}, "input[0].name"),
    "a tool that is no function": ({"tools": [*TOOLS, {"type": "web_search"}]}, "tools[2].type"),
    "a tool without a name": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "a tool twice": ({"tools": [*TOOLS, TOOLS[1]]}, "tools[2].name"),
    "a strict tool's schema": ({"tools": [{**TOOLS[0], "parameters": UNKNOWN, "strict": True}]}, "tools"),
    "a choice of no tool": (chosen("function", "x"), "tool_choice"),
    "a choice of another type": (chosen("custom", "now"), "tool_choice.type"),
    "a format that is unknown": (formatted("grammar"), "text.format.type"),
    "a schema that is none": (formatted("json_schema", schema={"type": "x"}), "text.format.schema"),
    "no schema": (formatted("json_schema"), "text.format.schema"),
    "verbosity": ({"text": {"verbosity": "low"}}, "text.verbosity"),
    "a summary": ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    "include": ({"include": ["file_search_call.results"]}, "include[0]"),
    "max_output_tokens": ({"max_output_tokens": 10**6}, "max_output_tokens"),
    "metadata": ({"metadata": {"a": "x" * 513}}, "metadata[...]"),
    "previous_response_id": ({"previous_response_id": "resp_0"}, "previous_response_id"),
    "another model": ({"model": "gpt"}, "model"),
    **{
        name: ({name: value}, name)
        for name, value in {"background": True, "truncation": "auto", "max_tool_calls": 1, "n": 2}.items()
    },
}


@pytest.mark.parametrize(("body", "field"), BAD.values(), ids=BAD)
def test_bad_input_names_the_field(hermes, body, field):
    answer = hermes.router.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if field == "model" else 400, field), error
    assert error["message"].startswith(field) or field == "model"


def test_options_without_effect_are_accepted(client, hermes):
    harmless = {"background": False, "truncation": "disabled", "top_logprobs": 0, "service_tier": "auto"}
    harmless |= {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "user": "me"}
    assert ask(client, hermes, "No.", **harmless, prompt_cache_key="x").output_text == "No."


def test_a_failed_stream_ends_with_an_error(make_scripted):
    scripted = make_scripted("model", HERMES, request_timeout=2.5)
    scripted.worker.stall_after = 6
    with client_of(scripted) as client:
        *_, last = ask(client, scripted, "No. " * 30, stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert "longer" in last.response.error.message
    assert last.response.output[0].status == "incomplete"
    with client_of(scripted) as client, pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)


def test_a_key_never_sees_anothers_responses(make_scripted):
    scripted = make_scripted("model", HERMES, api_key="a,b")
    with client_of(scripted, "a") as first, client_of(scripted, "b") as second:
        answer = ask(first, scripted, "No.")
        assert first.responses.retrieve(answer.id).id == answer.id
        for look in (
            second.responses.retrieve,
            second.responses.delete,
            second.responses.cancel,
            second.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError):
                look(answer.id)
        with pytest.raises(openai.BadRequestError):
            ask(second, scripted, "No.", previous_response_id=answer.id)
        first.responses.delete(answer.id)
    assert httpx.get(f"{scripted.router.url}/v1/responses/{answer.id}", timeout=60).status_code == 401


@pytest.mark.parametrize("options", [{"router_replicas": 2}, {"max_stored_responses": 0}])
def test_a_server_without_a_store_says_so(make_scripted, options):
    """Any of several routers may get the next request, so memory is not enough."""
    scripted = make_scripted("model", HERMES, **options)
    with client_of(scripted) as client:
        answer = ask(client, scripted, "No.")
        assert answer.output_text == "No." and answer.to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match="--response-store"):
            ask(client, scripted, "No.", previous_response_id=answer.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)


# --- the store ----------------------------------------------------------------------------------------


def store(dropped: list[str], **options) -> ResponseStore:
    return ResponseStore(ServeConfig(**options), dropped.append)


def response(number: int, size: int = 10) -> StoredResponse:
    return StoredResponse(f"resp_{number}", "me", b"b" * (size // 2), b"i" * (size - size // 2))


def found(kept: ResponseStore, numbers: range) -> list[int]:
    return [number for number in numbers if kept.get(f"resp_{number}", "me") is not None]


@pytest.mark.parametrize("name", ["store", "store-wal", "store-shm", "store-journal"])
def test_files_that_others_can_write_are_refused(tmp_path, name):
    (tmp_path / name).touch()
    (tmp_path / name).chmod(0o666)
    with pytest.raises(ConfigError, match="--response-store: cannot use"):
        store([], response_store=str(tmp_path / "store"))
    assert not (tmp_path / "store").exists() or name == "store"


def test_a_folder_that_others_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="--response-store: cannot use"):
        store([], response_store=str(tmp_path / "store"))


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_oldest_responses_are_dropped(tmp_path, on_disk):
    place = {"response_store": str(tmp_path / "store")} if on_disk else {}
    dropped: list[str] = []
    by_number = store(dropped, max_stored_responses=3, **place)
    for number in range(5):
        by_number.put(response(number))
    assert found(by_number, range(5)) == [2, 3, 4] and dropped == ["full"] * 2
    by_number.close()
    by_bytes = store(dropped, max_stored_response_bytes=35, **place)
    for number in range(5, 10):
        by_bytes.put(response(number))
    assert found(by_bytes, range(10)) == [7, 8, 9]
    by_bytes.put(response(10, 36))
    assert found(by_bytes, range(11)) == [7, 8, 9], "one that never fits drives no other out"
    by_bytes.close()


def test_a_file_outlives_its_router_and_is_shared(tmp_path):
    path, dropped = tmp_path / "store", []
    first, second = (store(dropped, response_store=str(path)) for _ in range(2))
    assert path.stat().st_mode & 0o077 == 0
    first.put(response(1))
    assert second.get("resp_1", "me") == response(1) and second.get("resp_1", "you") is None
    assert second.delete("resp_1", "me") and not first.delete("resp_1", "me")
    second.put(response(2))
    first.close(), second.close()
    again = store(dropped, response_store=str(path))
    assert again.get("resp_2", "me") == response(2) and not dropped
    again.close()


def test_a_full_disk_refuses_new_responses_and_keeps_the_stored_ones(tmp_path, caplog):
    dropped: list[str] = []
    kept = store(dropped, response_store=str(tmp_path / "store"))
    with full_disk(100_000):
        stored = [number for number in range(20) if kept.put(response(number, 10_000))]
        assert 0 < len(stored) < 20 and dropped == ["failed"] * (20 - len(stored))
        assert found(kept, range(20)) == stored
        with pytest.raises(ApiError, match="stored responses are out of reach: "):
            kept.delete(f"resp_{stored[0]}", "me")
    assert kept.put(response(20, 10_000)) and found(kept, range(21)) == [*stored, 20]
    assert caplog.text.count("could not be stored") == 1, "a full disk does not fill the log"
    kept.close()


def test_a_foreign_or_broken_file(tmp_path):
    (tmp_path / "text").write_text("not a database" * 100)
    for path in (tmp_path / "text", tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(ConfigError, match="--response-store"):
            store([], response_store=str(path))
    dropped: list[str] = []
    kept = store(dropped, response_store=str(tmp_path / "store"))
    with sqlite3.connect(tmp_path / "store") as other:
        other.execute("drop table responses")
    kept.put(response(1))
    assert dropped == ["failed"]
    kept.close()


def ask_both(client: openai.OpenAI, scripted: Scripted, **options) -> list:
    """Return a whole answer, and the last event's of a stream."""
    *_, last = ask(client, scripted, "No.", stream=True, **options)
    return [ask(client, scripted, "No.", **options), last.response]


def test_a_response_that_could_not_be_stored_is_sent_and_says_so(tmp_path, make_scripted):
    scripted = make_scripted("model", HERMES, response_store=str(tmp_path / "store"))
    with client_of(scripted) as client, sqlite3.connect(tmp_path / "store") as other:
        assert [answer.to_dict()["store"] for answer in ask_both(client, scripted)] == [True, True]
        other.execute("drop table responses")
        other.commit()
        for answer in ask_both(client, scripted):
            assert answer.output_text == "No." and answer.to_dict()["store"] is False
            with pytest.raises(openai.InternalServerError):
                client.responses.retrieve(answer.id)
    assert scripted.router.metric("tandem_stored_responses_dropped_total", reason="failed") == 2


def test_a_response_that_is_too_large_to_store_says_so(make_scripted):
    scripted = make_scripted("model", HERMES, max_stored_response_bytes=4000)
    with client_of(scripted) as client:
        for answer in ask_both(client, scripted, metadata={str(number): "x" * 500 for number in range(16)}):
            assert answer.output_text == "No." and answer.to_dict()["store"] is False
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(answer.id)
        assert ask(client, scripted, "No.").to_dict()["store"] is True
    assert scripted.router.metric("tandem_stored_responses_dropped_total", reason="full") == 2
