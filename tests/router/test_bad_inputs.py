"""Each bad input gets its status, names its field, and changes nothing."""

from __future__ import annotations

import json

import pytest

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TAG = {"structures": [{"begin": "<a>", "schema": {}}], "triggers": ["<b"]}
DEEP = "[" * 100_000


def completion(**fields):
    return TEXT, {"prompt": "hello", "max_tokens": 2, **fields}


def chat(**fields):
    return CHAT, {"messages": HELLO, "max_tokens": 2, **fields}


def tool(**function):
    return chat(tools=[TOOL, {"type": "function", "function": {"name": "g", **function}}])


def called(*messages, **call):
    calls = [CALL, {**CALL, "id": "2", **call}]
    assistant = {"role": "assistant", "content": None, "tool_calls": calls}
    return chat(messages=[*HELLO, assistant, *messages])


def structured(field, **wanted):
    return f"structured_outputs{field}", *completion(structured_outputs=wanted)


def said(content, role="user", **more):
    return {"role": role, "content": [content] if isinstance(content, dict) else content, **more}


def messages(field, *said):
    return f"messages{field}", *chat(messages=[*said])


CASES = {
    "unknown model": ("model", *completion(model="gpt-4")),
    "no prompt": ("prompt", TEXT, {"max_tokens": 2}),
    "null prompt": ("prompt", *completion(prompt=None)),
    "empty prompt": ("prompt", *completion(prompt="")),
    "list with an empty prompt": ("prompt", *completion(prompt=["a", ""])),
    "empty token prompt": ("prompt", *completion(prompt=[[]])),
    "mixed prompt": ("prompt", *completion(prompt=["a", 1])),
    "token id too large": ("prompt", *completion(prompt=[5, 600])),
    "negative token id": ("prompt", *completion(prompt=[-1])),
    "prompt too long": ("prompt", *completion(prompt=[5] * 512)),
    "prompt text far too long": ("prompt", *completion(prompt="a b " * 1_000_000)),
    "max_tokens zero": ("max_tokens", *completion(max_tokens=0)),
    "max_tokens above the room": ("max_tokens", *completion(max_tokens=512)),
    "max_completion_tokens above the room": ("max_completion_tokens", *chat(max_completion_tokens=512)),
    "temperature a string": ("temperature", *completion(temperature="hot")),
    "temperature NaN": ("temperature", *completion(temperature=float("nan"))),
    "top_p above one": ("top_p", *completion(top_p=1.1)),
    "top_k beyond 64 bits": ("top_k", *completion(top_k=2**64)),
    "repetition_penalty next to nothing": ("repetition_penalty", *chat(repetition_penalty=1e-39)),
    "n zero": ("n", *completion(n=0)),
    "n too large": ("n", *completion(n=129)),
    "n times prompts": ("prompt", *completion(prompt=["a"] * 20, n=10)),
    "too many token prompts": ("prompt", *completion(prompt=[[5]] * 129)),
    "too many prompts of quotes": ("prompt", *completion(prompt=['\\"'] * 129)),
    "best_of": ("best_of", *completion(best_of=2)),
    "beam search": ("use_beam_search", *completion(use_beam_search=True)),
    "suffix": ("suffix", *completion(suffix="end")),
    "logprobs too many": ("logprobs", *completion(logprobs=21)),
    "prompt_logprobs too many": ("prompt_logprobs", *completion(prompt_logprobs=21)),
    "prompt_logprobs streamed": ("prompt_logprobs", *completion(prompt_logprobs=1, stream=True)),
    "top_logprobs without logprobs": ("top_logprobs", *chat(top_logprobs=2)),
    "top_logprobs too many": ("top_logprobs", *chat(logprobs=True, top_logprobs=21)),
    "logit_bias key": ("logit_bias", *completion(logit_bias={"fox": 1})),
    "logit_bias NaN": ("logit_bias", *completion(logit_bias={"5": float("nan")})),
    "stop empty": ("stop", *completion(stop="")),
    "stop with an empty one": ("stop", *completion(stop=["a", ""])),
    "too many stops": ("stop", *completion(stop=["x"] * 65)),
    "stop too long": ("stop", *completion(stop="x" * 1025)),
    "bad_words empty": ("bad_words", *completion(bad_words=[""])),
    "bad_words of a space": ("bad_words", *completion(bad_words=[" "])),
    "too many bad_words": ("bad_words", *completion(bad_words=["x"] * 1025)),
    "too many allowed_token_ids": ("allowed_token_ids", *completion(allowed_token_ids=[5] * (2**19 + 1))),
    "min_tokens above max_tokens": ("min_tokens", *completion(min_tokens=3)),
    "stream_options without stream": ("stream_options", *completion(stream_options={"include_usage": True})),
    "stream_options of the wrong type": (
        "stream_options.include_usage",
        *completion(stream=True, stream_options={"include_usage": 1}),
    ),
    "priority": ("priority", *completion(priority=2**31)),
    "truncate_prompt_tokens zero": ("truncate_prompt_tokens", *completion(truncate_prompt_tokens=0)),
    "truncate_prompt_tokens below -1": ("truncate_prompt_tokens", *chat(truncate_prompt_tokens=-2)),
    "truncate_prompt_tokens of the whole context": (
        "truncate_prompt_tokens",
        *completion(truncate_prompt_tokens=512),
    ),
    "cache_salt": ("cache_salt", *completion(cache_salt="x" * 257)),
    "structured output": (
        "response_format.json_schema.schema",
        *chat(response_format={"type": "json_schema", "json_schema": {}}),
    ),
    "too many tools": ("tools", *chat(tools=[TOOL] * 129)),
    "a tool of another kind": (
        "tools[0].type",
        *chat(tools=[{**TOOL, "type": "browser"}], tool_choice="none"),
    ),
    "a tool's name": ("tools[1].function.name", *tool(name="two words")),
    "a tool's name twice": ("tools[1].function.name", *chat(tools=[TOOL, TOOL], tool_choice="none")),
    "a tool's parameters": (
        "tools[0].function.parameters",
        *chat(tools=[{"type": "function", "function": {"name": "f", "parameters": []}}], tool_choice="none"),
    ),
    "a choice without tools": ("tool_choice", *chat(tool_choice="required")),
    "a call of a function that is not there": (
        "tool_choice",
        *chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
    ),
    "an unknown choice": ("tool_choice", *chat(tools=[TOOL], tool_choice="perhaps")),
    "a budget for what the model does not do": ("thinking_token_budget", *chat(thinking_token_budget=5)),
    "a budget of nothing": ("thinking_token_budget", *chat(thinking_token_budget=0)),
    "functions": ("functions", *chat(functions=[{"name": "f"}])),
    "audio": ("modalities", *chat(modalities=["text", "audio"])),
    "logits_processors": ("logits_processors", *completion(logits_processors=["x"])),
    "guided_json": ("guided_json", *completion(guided_json={})),
    "two structures": structured("", regex="a", choice=["b"]),
    "no structure": structured(""),
    "a regex elsewhere": ("regex", *completion(regex="a")),
    "a grammar elsewhere": ("grammar", MESSAGES, {"messages": HELLO, "max_tokens": 2, "grammar": "a"}),
    "a length penalty": ("length_penalty", *completion(length_penalty=2)),
    "a prediction of another type": ("prediction.type", *chat(prediction={"type": "x", "content": "a"})),
    "a prediction of an image": (
        "prediction.content[0].type",
        *chat(prediction={"content": [{"type": "image_url"}]}),
    ),
    "verbosity": ("verbosity", *chat(verbosity="low")),
    "no reasoning": ("include_reasoning", *chat(include_reasoning=False)),
    "unknown structure": structured("", xml="a"),
    "a format of another kind": ("response_format.type", *chat(response_format={"type": "xml"})),
    "a structure and a format": (
        "structured_outputs",
        *chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
    ),
    "a schema that is a list": structured(".json", json=[]),
    "a schema in a broken string": structured(".json", json="{"),
    "a schema too large": structured(".json", json={"title": "x" * 65_536}),
    "a regex too large": structured(".regex", regex="x" * 65_537),
    "a regex that is none": structured(".regex", regex="(a"),
    "a regex without a text": structured(".regex", regex="[^\\s\\S]"),
    "a grammar that is none": structured(".grammar", grammar="((("),
    "a tag without structures": structured(
        ".structural_tag.structures", structural_tag=TAG | {"structures": []}
    ),
    "a tag without its trigger": structured(".structural_tag.structures[0].begin", structural_tag=TAG),
    "structure and min_tokens": ("min_tokens", *completion(structured_outputs={"regex": "a"}, min_tokens=1)),
    "structure and ignore_eos": (
        "ignore_eos",
        *chat(response_format={"type": "json_object"}, ignore_eos=True),
    ),
    "template in the request": ("chat_template", *chat(chat_template="{{ 1 }}")),
    "no messages": ("messages", CHAT, {"max_tokens": 2}),
    "empty messages": messages(""),
    "unknown role": messages("[1].role", *HELLO, {"role": "king", "content": "x"}),
    "tool message without a call": messages("[1].tool_call_id", *HELLO, {"role": "tool", "content": "x"}),
    "tool message of another call": (
        "messages[2].tool_call_id",
        *called({"role": "tool", "tool_call_id": "3", "content": "x"}),
    ),
    "tool message without content": ("messages[2].content", *called({"role": "tool", "tool_call_id": "2"})),
    "a call of another kind": ("messages[1].tool_calls[1].type", *called(type="browser")),
    "a call's arguments too large": (
        "messages[1].tool_calls[1].function.arguments",
        *called(function={"name": "f", "arguments": " " * 2**20 + "{}"}),
    ),
    "calls of a user": messages("[0].tool_calls", {"role": "user", "content": "x", "tool_calls": [CALL]}),
    "message without content": messages("[0].content", {"role": "user"}),
    "image part": messages("[0].content[0].type", said({"type": "image_url", "image_url": {"url": "x"}})),
    "text part without text": messages("[0].content[0].text", said({"type": "text"})),
    "tool calls": messages("[1].tool_calls", *HELLO, said("x", "assistant", tool_calls=[{}])),
    "too many messages": ("messages", *chat(messages=HELLO * 16_385)),
    "template variables too large": ("chat_template_kwargs", *chat(chat_template_kwargs={"x": "x" * 65_536})),
    "both continue and generate": (
        "continue_final_message",
        *chat(add_generation_prompt=True, continue_final_message=True),
    ),
    "chat too long": messages("", {"role": "user", "content": "a b " * 1000}),
    "tokenize nothing": ("prompt", "/tokenize", {}),
    "tokenize both": ("prompt", "/tokenize", {"prompt": "x", "messages": HELLO}),
    "tokenize too much": ("prompt", "/tokenize", {"prompt": "a b " * 3_000_000}),
    "detokenize too much": ("tokens", "/detokenize", {"tokens": [5] * 513}),
    "detokenize out of range": ("tokens", "/detokenize", {"tokens": [600]}),
    "body a list": (None, TEXT, [1]),
}
OPENAIS = {
    "user": "me",
    "safety_identifier": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "prompt_cache_key": "a",
}


@pytest.mark.parametrize("size", [1, 20_000], ids=["small", "large"])
@pytest.mark.parametrize(
    ("path", "body"), [completion(), chat(), (MESSAGES, {"messages": HELLO, "max_tokens": 2})]
)
def test_unknown_fields_are_named(router, path, body, size):
    """A header lists them, cut and without invalid characters. OpenAI's own fields are known."""
    unknown = {"mirostat": 2, "a b\r\n": "x" * size, "y" * 3000: None}
    for fields, named in ((OPENAIS, None), (unknown, f"mirostat, a?b??, {'y' * 64}")):
        answer = router.http.post(path, json={**body, **fields})
        assert (answer.status_code, answer.headers.get("x-tandem-ignored-fields")) == (200, named), (
            answer.text
        )
    assert router.metric("tandem_requests_fields_ignored_total") >= 1


@pytest.mark.parametrize("name", CASES)
def test_bad_field(router, name):
    param, path, body = CASES[name]
    worker = router.workers[0]
    before = len(worker.generated)
    raw = json.dumps(body)
    response = router.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == (404 if name == "unknown model" else 400), response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is None:
        assert error["param"] is None
    else:
        assert error["param"] == param or error["param"].startswith(param + "[")
        assert param.split(".")[0].split("[")[0] in error["message"]
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert response.headers["x-request-id"]
    assert len(worker.generated) == before
    assert len(router.server.state.journal) == 0


RAW = {
    "no JSON": b"hello",
    "empty": b"",
    "cut off": b'{"prompt": "hel',
    "trailing bytes": b'{"prompt": "x"} {}',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"prompt": "\\ud800"}',
    "deep nesting": ('{"prompt": ' + DEEP).encode(),
    "deep nesting in a free field": ('{"prompt": "x", "tools": ' + DEEP).encode(),
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize"])
def test_bad_json(router, raw, path):
    response = router.http.post(path, content=raw)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_number_too_large_for_a_float(router):
    response = router.http.post(TEXT, content=b'{"prompt": "x", "temperature": 1e999}')
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


def test_limits_are_named(router):
    def message(path, body):
        return router.http.post(path, json=body).json()["error"]["message"]

    text = message(*completion(prompt=[5] * 600))
    assert "600" in text
    assert "512" in text
    assert "500 are in the prompt and 13" in message(*completion(prompt=[5] * 500, max_tokens=13))
    text = message(*completion(max_tokens=600))
    assert "512" in text
    assert "600" in text
    assert "[0, 599]" in message(*completion(prompt=[1000]))
    assert "128" in message(*completion(n=200))
    assert "[0, 20]" in message(*completion(logprobs=50))
    assert message(CHAT, {}) == "messages: is required"
    assert message(*tool(name=None)) == "tools[1].function.name: expected str, got null"
    assert message(*chat(tools=[TOOL | {"function": {}}])) == "tools[0].function.name: is required"


@pytest.mark.parametrize("size", [512, 3_000, 1_000_000])
def test_what_exceeds_the_context_has_one_code_however_long_it_is(router, size):
    chats = {"messages": [{"role": "user", "content": "a " * size}], "max_tokens": 2}
    for path, body in ((TEXT, {"prompt": "a " * size}), (CHAT, chats), (MESSAGES, chats)):
        error = router.http.post(path, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded", error


HARMLESS = {
    "defaults as null": completion(
        best_of=None, logprobs=None, stop=None, logit_bias=None, stream_options=None, n=None, seed=None
    ),
    "unknown fields": completion(frobnicate=1, user="me", service_tier="auto", store=False),
    "text format": chat(response_format={"type": "text"}, tools=[], tool_choice="none", modalities=["text"]),
    "best_of equal to n": completion(best_of=2, n=2),
    "empty suffix": completion(suffix=""),
    "max_tokens and max_completion_tokens": chat(max_completion_tokens=2),
    "integers for floats": completion(temperature=1, top_p=1),
    "as many bad_words as there may be": completion(bad_words=["x"] * 1024),
    "as many tokens as fit": completion(prompt=[5] * 500, max_tokens=12),
    "quotes and brackets in a text": completion(prompt='["[[a]]\\"' * 20),
    "text with quotes in a list": completion(prompt=['"[a]\\', '""'], n=64),
    "no tool calls": chat(messages=[{"role": "user", "content": "x", "tool_calls": []}]),
}


@pytest.mark.parametrize("case", HARMLESS.values(), ids=HARMLESS)
def test_harmless_fields(router, case):
    path, body = case
    response = router.http.post(path, json=body)
    assert response.status_code == 200, response.text


def test_names_that_the_client_chose_are_cut_in_answers(router):
    for body in ({"model": "x" * 1_000_000}, {"prompt": "x", "y" * 50_000: float("nan")}):
        answer = router.http.post(TEXT, content=json.dumps(body))
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 3000


def test_duplicates_of_allowed_tokens_are_removed(router):
    worker = next(worker for worker in router.workers if worker.role == "prefill")
    worker.generated.clear()
    path, body = completion(allowed_token_ids=[6, 5] * 1000, n=2)
    assert router.http.post(path, json=body).status_code == 200
    assert [request.sampling.allowed_token_ids for request in worker.generated] == [[5, 6]] * 2
