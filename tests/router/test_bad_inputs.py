"""Bad input: each gets its status, names its field, and changes nothing."""

from __future__ import annotations

import json

import pytest

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
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


CASES = {
    "unknown model": (*completion(model="gpt-4"), 404, "model"),
    "unknown chat model": (*chat(model="gpt-4"), 404, "model"),
    "model of the wrong type": (*completion(model=3), 400, "model"),
    "no prompt": (TEXT, {"max_tokens": 2}, 400, "prompt"),
    "null prompt": (*completion(prompt=None), 400, "prompt"),
    "empty prompt": (*completion(prompt=""), 400, "prompt"),
    "empty list prompt": (*completion(prompt=[]), 400, "prompt"),
    "list with an empty prompt": (*completion(prompt=["a", ""]), 400, "prompt"),
    "empty token prompt": (*completion(prompt=[[]]), 400, "prompt"),
    "prompt of numbers": (*completion(prompt=12), 400, "prompt"),
    "prompt of floats": (*completion(prompt=[1.5]), 400, "prompt"),
    "mixed prompt": (*completion(prompt=["a", 1]), 400, "prompt"),
    "token id too large": (*completion(prompt=[5, 600]), 400, "prompt"),
    "negative token id": (*completion(prompt=[-1]), 400, "prompt"),
    "prompt too long": (*completion(prompt=[5] * 512), 400, "prompt"),
    "prompt text too long": (*completion(prompt="a b " * 1000), 400, "prompt"),
    "prompt text far too long": (*completion(prompt="a b " * 1_000_000), 400, "prompt"),
    "max_tokens zero": (*completion(max_tokens=0), 400, "max_tokens"),
    "max_tokens negative": (*completion(max_tokens=-5), 400, "max_tokens"),
    "max_tokens a string": (*completion(max_tokens="5"), 400, "max_tokens"),
    "max_tokens a bool": (*completion(max_tokens=True), 400, "max_tokens"),
    "max_tokens a fraction": (*completion(max_tokens=2.5), 400, "max_tokens"),
    "max_tokens above the room": (*completion(max_tokens=512), 400, "max_tokens"),
    "max_tokens huge": (*completion(max_tokens=2**70), 400, "max_tokens"),
    "max_completion_tokens above the room": (*chat(max_completion_tokens=512), 400, "max_completion_tokens"),
    "temperature negative": (*completion(temperature=-0.1), 400, "temperature"),
    "temperature huge": (*completion(temperature=1e6), 400, "temperature"),
    "temperature a string": (*completion(temperature="hot"), 400, "temperature"),
    "temperature NaN": (*completion(temperature=float("nan")), 400, "temperature"),
    "temperature Infinity": (*chat(temperature=float("inf")), 400, "temperature"),
    "return_timing a number": (*completion(return_timing=1), 400, "return_timing"),
    "return_timing a string": (*chat(return_timing="yes"), 400, "return_timing"),
    "top_p zero": (*completion(top_p=0), 400, "top_p"),
    "top_p above one": (*completion(top_p=1.1), 400, "top_p"),
    "top_p NaN": (*completion(top_p=float("nan")), 400, "top_p"),
    "top_k below -1": (*completion(top_k=-2), 400, "top_k"),
    "top_k a fraction": (*completion(top_k=1.5), 400, "top_k"),
    "top_k beyond 64 bits": (*completion(top_k=2**64), 400, "top_k"),
    "min_p above one": (*completion(min_p=2), 400, "min_p"),
    "presence_penalty": (*completion(presence_penalty=3), 400, "presence_penalty"),
    "frequency_penalty": (*chat(frequency_penalty=-2.5), 400, "frequency_penalty"),
    "repetition_penalty": (*completion(repetition_penalty=0), 400, "repetition_penalty"),
    "repetition_penalty next to nothing": (*chat(repetition_penalty=1e-39), 400, "repetition_penalty"),
    "n zero": (*completion(n=0), 400, "n"),
    "n too large": (*completion(n=129), 400, "n"),
    "n times prompts": (*completion(prompt=["a"] * 20, n=10), 400, "prompt"),
    "too many token prompts": (*completion(prompt=[[5]] * 129), 400, "prompt"),
    "too many prompts of quotes": (*completion(prompt=['\\"'] * 129), 400, "prompt"),
    "best_of": (*completion(best_of=2), 400, "best_of"),
    "beam search": (*completion(use_beam_search=True), 400, "use_beam_search"),
    "suffix": (*completion(suffix="end"), 400, "suffix"),
    "seed too large": (*completion(seed=2**63), 400, "seed"),
    "seed a fraction": (*completion(seed=1.5), 400, "seed"),
    "logprobs negative": (*completion(logprobs=-1), 400, "logprobs"),
    "logprobs too many": (*completion(logprobs=21), 400, "logprobs"),
    "prompt_logprobs too many": (*completion(prompt_logprobs=21), 400, "prompt_logprobs"),
    "prompt_logprobs streamed": (*completion(prompt_logprobs=1, stream=True), 400, "prompt_logprobs"),
    "top_logprobs without logprobs": (*chat(top_logprobs=2), 400, "top_logprobs"),
    "top_logprobs too many": (*chat(logprobs=True, top_logprobs=21), 400, "top_logprobs"),
    "chat logprobs a number": (*chat(logprobs=3), 400, "logprobs"),
    "logit_bias key": (*completion(logit_bias={"fox": 1}), 400, "logit_bias"),
    "logit_bias value": (*completion(logit_bias={"5": 101}), 400, "logit_bias"),
    "logit_bias token": (*completion(logit_bias={"600": 1}), 400, "logit_bias"),
    "logit_bias NaN": (*completion(logit_bias={"5": float("nan")}), 400, "logit_bias"),
    "stop empty": (*completion(stop=""), 400, "stop"),
    "stop with an empty one": (*completion(stop=["a", ""]), 400, "stop"),
    "stop a number": (*completion(stop=5), 400, "stop"),
    "too many stops": (*completion(stop=["x"] * 65), 400, "stop"),
    "stop too long": (*completion(stop="x" * 1025), 400, "stop"),
    "stop_token_ids": (*completion(stop_token_ids=[600]), 400, "stop_token_ids"),
    "allowed_token_ids empty": (*completion(allowed_token_ids=[]), 400, "allowed_token_ids"),
    "allowed_token_ids": (*completion(allowed_token_ids=[-1]), 400, "allowed_token_ids"),
    "bad_words empty": (*completion(bad_words=[""]), 400, "bad_words"),
    "bad_words of a space": (*completion(bad_words=[" "]), 400, "bad_words"),
    "too many bad_words": (*completion(bad_words=["x"] * 1025), 400, "bad_words"),
    "too many allowed_token_ids": (
        *completion(allowed_token_ids=[5] * (2**19 + 1)),
        400,
        "allowed_token_ids",
    ),
    "min_tokens above max_tokens": (*completion(min_tokens=3), 400, "min_tokens"),
    "min_tokens negative": (*completion(min_tokens=-1), 400, "min_tokens"),
    "stream a string": (*completion(stream="yes"), 400, "stream"),
    "stream_options without stream": (
        *completion(stream_options={"include_usage": True}),
        400,
        "stream_options",
    ),
    "stream_options of the wrong type": (
        *completion(stream=True, stream_options={"include_usage": 1}),
        400,
        "stream_options.include_usage",
    ),
    "priority": (*completion(priority=2**31), 400, "priority"),
    "truncate_prompt_tokens zero": (*completion(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens"),
    "truncate_prompt_tokens below -1": (*chat(truncate_prompt_tokens=-2), 400, "truncate_prompt_tokens"),
    "truncate_prompt_tokens of the whole context": (
        *completion(truncate_prompt_tokens=512),
        400,
        "truncate_prompt_tokens",
    ),
    "cache_salt": (*completion(cache_salt="x" * 257), 400, "cache_salt"),
    "structured output": (
        *chat(response_format={"type": "json_schema", "json_schema": {}}),
        400,
        "response_format.json_schema.schema",
    ),
    "tools an object": (*chat(tools=TOOL), 400, "tools"),
    "too many tools": (*chat(tools=[TOOL] * 129), 400, "tools"),
    "a tool of another kind": (
        *chat(tools=[{**TOOL, "type": "browser"}], tool_choice="none"),
        400,
        "tools[0].type",
    ),
    "a tool without a function": (*chat(tools=[{"type": "function"}]), 400, "tools[0]"),
    "a tool's name": (*tool(name="two words"), 400, "tools[1].function.name"),
    "a tool's name twice": (
        *chat(tools=[TOOL, TOOL], tool_choice="none"),
        400,
        "tools[1].function.name",
    ),
    "a tool's parameters": (
        *chat(tools=[{"type": "function", "function": {"name": "f", "parameters": []}}], tool_choice="none"),
        400,
        "tools[0].function.parameters",
    ),
    "a choice without tools": (*chat(tool_choice="required"), 400, "tool_choice"),
    "a call of a function that is not there": (
        *chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}),
        400,
        "tool_choice",
    ),
    "an unknown choice": (*chat(tools=[TOOL], tool_choice="perhaps"), 400, "tool_choice"),
    "a choice of the wrong type": (*chat(tools=[TOOL], tool_choice=3), 400, "tool_choice"),
    "a budget for what the model does not do": (
        *chat(thinking_token_budget=5),
        400,
        "thinking_token_budget",
    ),
    "a budget of nothing": (*chat(thinking_token_budget=0), 400, "thinking_token_budget"),
    "parallel_tool_calls a number": (*chat(parallel_tool_calls=1), 400, "parallel_tool_calls"),
    "functions": (*chat(functions=[{"name": "f"}]), 400, "functions"),
    "audio": (*chat(modalities=["text", "audio"]), 400, "modalities"),
    "logits_processors": (*completion(logits_processors=["x"]), 400, "logits_processors"),
    "guided_json": (*completion(guided_json={}), 400, "guided_json"),
    "two structures": (
        *completion(structured_outputs={"regex": "a", "choice": ["b"]}),
        400,
        "structured_outputs",
    ),
    "no structure": (*completion(structured_outputs={}), 400, "structured_outputs"),
    "unknown structure": (*completion(structured_outputs={"xml": "a"}), 400, "structured_outputs"),
    "a format of another kind": (*chat(response_format={"type": "xml"}), 400, "response_format.type"),
    "a structure and a format": (
        *chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        400,
        "structured_outputs",
    ),
    "a schema that is a list": (*completion(structured_outputs={"json": []}), 400, "structured_outputs.json"),
    "a schema in a broken string": (
        *completion(structured_outputs={"json": "{"}),
        400,
        "structured_outputs.json",
    ),
    "a schema too large": (
        *completion(structured_outputs={"json": {"title": "x" * 65_536}}),
        400,
        "structured_outputs.json",
    ),
    "a regex too large": (
        *completion(structured_outputs={"regex": "x" * 65_537}),
        400,
        "structured_outputs.regex",
    ),
    "a regex that is none": (
        *completion(structured_outputs={"regex": "(a"}),
        400,
        "structured_outputs.regex",
    ),
    "a regex without a text": (
        *completion(structured_outputs={"regex": "[^\\s\\S]"}),
        400,
        "structured_outputs.regex",
    ),
    "a grammar that is none": (
        *completion(structured_outputs={"grammar": "((("}),
        400,
        "structured_outputs.grammar",
    ),
    "a tag without structures": (
        *completion(structured_outputs={"structural_tag": {"structures": [], "triggers": []}}),
        400,
        "structured_outputs.structural_tag.structures",
    ),
    "a tag without its trigger": (
        *completion(
            structured_outputs={
                "structural_tag": {"structures": [{"begin": "<a>", "schema": {}}], "triggers": ["<b"]}
            }
        ),
        400,
        "structured_outputs.structural_tag.structures[0].begin",
    ),
    "structure and min_tokens": (
        *completion(structured_outputs={"regex": "a"}, min_tokens=1),
        400,
        "min_tokens",
    ),
    "structure and ignore_eos": (
        *chat(response_format={"type": "json_object"}, ignore_eos=True),
        400,
        "ignore_eos",
    ),
    "template in the request": (*chat(chat_template="{{ 1 }}"), 400, "chat_template"),
    "no messages": (CHAT, {"max_tokens": 2}, 400, "messages"),
    "empty messages": (*chat(messages=[]), 400, "messages"),
    "messages a string": (*chat(messages="hello"), 400, "messages"),
    "message without role": (*chat(messages=[{"content": "x"}]), 400, "messages[0]"),
    "unknown role": (*chat(messages=[*HELLO, {"role": "king", "content": "x"}]), 400, "messages[1].role"),
    "tool message without a call": (
        *chat(messages=[*HELLO, {"role": "tool", "content": "x"}]),
        400,
        "messages[1].tool_call_id",
    ),
    "tool message of another call": (
        *called({"role": "tool", "tool_call_id": "3", "content": "x"}),
        400,
        "messages[2].tool_call_id",
    ),
    "tool message without content": (
        *called({"role": "tool", "tool_call_id": "2"}),
        400,
        "messages[2].content",
    ),
    "a call of another kind": (*called(type="browser"), 400, "messages[1].tool_calls[1].type"),
    "a call's arguments too large": (
        *called(function={"name": "f", "arguments": " " * 2**20 + "{}"}),
        400,
        "messages[1].tool_calls[1].function.arguments",
    ),
    "calls of a user": (
        *chat(messages=[{"role": "user", "content": "x", "tool_calls": [CALL]}]),
        400,
        "messages[0].tool_calls",
    ),
    "message without content": (*chat(messages=[{"role": "user"}]), 400, "messages[0].content"),
    "content a number": (*chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
    "image part": (
        *chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400,
        "messages[0].content[0].type",
    ),
    "text part without text": (
        *chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        400,
        "messages[0].content[0].text",
    ),
    "tool calls": (
        *chat(messages=[*HELLO, {"role": "assistant", "content": "x", "tool_calls": [{}]}]),
        400,
        "messages[1].tool_calls",
    ),
    "too many messages": (*chat(messages=HELLO * 16_385), 400, "messages"),
    "template variables too large": (
        *chat(chat_template_kwargs={"x": "x" * 65_536}),
        400,
        "chat_template_kwargs",
    ),
    "template variables a list": (*chat(chat_template_kwargs=[]), 400, "chat_template_kwargs"),
    "both continue and generate": (
        *chat(add_generation_prompt=True, continue_final_message=True),
        400,
        "continue_final_message",
    ),
    "chat too long": (*chat(messages=[{"role": "user", "content": "a b " * 1000}]), 400, "messages"),
    "tokenize nothing": ("/tokenize", {}, 400, "prompt"),
    "tokenize both": ("/tokenize", {"prompt": "x", "messages": HELLO}, 400, "prompt"),
    "tokenize too much": ("/tokenize", {"prompt": "a b " * 3_000_000}, 400, "prompt"),
    "detokenize too much": ("/detokenize", {"tokens": [5] * 513}, 400, "tokens"),
    "detokenize out of range": ("/detokenize", {"tokens": [600]}, 400, "tokens"),
    "detokenize strings": ("/detokenize", {"tokens": ["x"]}, 400, "tokens[0]"),
    "body a list": (TEXT, [1], 400, None),
    "body a string": (TEXT, "hello", 400, None),
    "body null": (TEXT, None, 400, None),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_field(router, case):
    path, body, status, param = case
    worker = router.workers[0]
    before = len(worker.generated)
    raw = json.dumps(body)
    response = router.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
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


def test_what_the_client_chose_is_cut_in_answers(router):
    for body in ({"model": "x" * 1_000_000}, {"prompt": "x", "y" * 50_000: float("nan")}):
        answer = router.http.post(TEXT, content=json.dumps(body))
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 3000


def test_duplicates_of_allowed_tokens_stay_here(router):
    worker = next(worker for worker in router.workers if worker.role == "prefill")
    worker.generated.clear()
    path, body = completion(allowed_token_ids=[6, 5] * 1000, n=2)
    assert router.http.post(path, json=body).status_code == 200
    assert [request.sampling.allowed_token_ids for request in worker.generated] == [[5, 6]] * 2
