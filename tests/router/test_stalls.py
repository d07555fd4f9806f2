"""No request and no answer blocks the event loop, however large a client makes them."""

from __future__ import annotations

import json
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from messaging.sockets import ClusterKeys
from router.preprocessing.requests import FAST_INLINE_BYTES, INLINE_OBJECTS
from tests.router import fake_worker
from tests.router.conftest import byte_level_tokenizer
from tests.router.fake_worker import FakeWorker
from tests.router.router_clients import eventually

MAX_STALL_S = 0.05
MAX_BODY_BYTES = 1024 * 1024
"""Below the default, since there are many fields. Some cases below use the default."""
QUADRATIC = (
    "{% for m in messages %}{% for other in messages %}"
    "{% if other.role == 'none' and loop.index0 == 3 %}{{ other.content }}{% endif %}"
    "{% endfor %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
USER = {"role": "user", "content": "x"}
COMPLETION, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES = "/v1/messages"
NEEDED: dict[str, dict[str, Any]] = {
    COMPLETION: {"prompt": "x", "max_tokens": 1},
    CHAT: {"messages": [USER], "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1},
    MESSAGES: {"messages": [USER], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": "x"},
    "/score": {"text_1": "x", "text_2": "x"},
    "/v1/rerank": {"query": "x", "documents": ["x"]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/scale": {},
    "/restart": {"unknown": 1},
    "/workers/{worker_id}/drain": {"unknown": 1},
    "/workers/{worker_id}/role": {"role": "none"},
}
"""The fields of a request that changes nothing. Each new endpoint needs a line here."""


class StallServer:
    """A router in a separate process, with a worker in this one."""

    def __init__(self, folder: Path, **options: Any) -> None:
        model = folder / "model"
        model.mkdir()
        byte_level_tokenizer().save(str(model / "tokenizer.json"))
        settings = {"eos_token": "<|end|>", "chat_template": QUADRATIC}
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        stalls = folder / "stalls"
        stalls.write_bytes(bytes(8))
        config = {
            "model": str(model),
            "port": 0,
            "placement": "least_loaded",
            "enable_embeddings": True,
            "disaggregation": False,
            "tool_call_parser": "hermes",
            "reasoning_parser": "qwen3",
            "worker_timeout": 60.0,  # on a busy host the worker may be silent for seconds
            **options,
        }
        keys = ClusterKeys.generate()
        script = Path(__file__).with_name("stall_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), json.dumps(config), str(stalls)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(keys) + b"\n")
        self._process.stdin.flush()
        url, endpoint = self._process.stdout.readline().decode().split()
        self.worker = FakeWorker([endpoint], keys, max_model_len=131_072).start()
        with stalls.open("r+b") as file:
            self._view = mmap.mmap(file.fileno(), 8)
        self.http = httpx.Client(base_url=url, timeout=120, verify=False)
        eventually(lambda: self.http.get("/ready").status_code == 200)
        # the preprocessor has started
        assert self.http.post("/tokenize", json={"prompt": "x" * 20_000}).status_code == 200

    def stall_s(self, path: str, body: bytes | None) -> float:
        """Return the longest stall while the request was answered: the minimum of some trials.

        Without a body the request is a GET.
        """
        method = "GET" if body is None else "POST"
        longest = float("inf")
        for _ in range(8):
            self._view[:8] = bytes(8)
            answer = self.http.request(method, path.replace("{worker_id}", "none"), content=body)
            assert answer.status_code < 500, answer.text
            time.sleep(0.01)  # let the loop's turn that wrote the answer end
            (seconds,) = struct.unpack("d", self._view[:8])
            longest = min(longest, seconds)
            if longest <= MAX_STALL_S:
                break
        return longest

    def close(self) -> None:
        self.http.close()
        self._process.kill()
        self._process.wait()
        self.worker.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StallServer]:
    started = StallServer(tmp_path_factory.mktemp("stalls"), max_body_bytes=MAX_BODY_BYTES)
    yield started
    started.close()


TYPES = {
    "ResponseFormat": "json_schema",
    "Tool": "function",
    "NamedTool": "function",
    "ToolName": "function",
    "ResponseTool": "function",
    "ToolCall": "function",
    "ItemPart": "input_text",
    "ContentBlock": "tool_result",
    "Item": "message",
    "TextFormat": "json_schema",
    "OutputFormat": "json_schema",
    "MessageToolChoice": "tool",
    "PredictedContent": "content",
    "Thinking": "enabled",
}
"""The `type` of an object whose fields are filled; `text` otherwise."""


def json_object(members: Mapping[str, bytes]) -> bytes:
    """Return the object whose values are JSON already."""
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in members.items())


class Filler:
    """Makes JSON values of about `size` bytes that are valid for a schema. `kinds`: the named schemas."""

    def __init__(self, kinds: dict[str, Any], size: int) -> None:
        self._kinds = kinds
        self._size = size

    def fill(self, schema: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
        """Yield a large value for each part of the field that can be large, with the part's place."""
        for each in schema.get("anyOf", [schema]):
            yield from self._struct(each) if "$ref" in each else self._plain(each)

    def _struct(self, reference: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
        name = reference["$ref"].rpartition("/")[2]
        kind = self._kinds[name]
        needed = {each: self._least(kind["properties"][each]) for each in kind.get("required", ())}
        if "type" in kind["properties"]:
            needed["type"] = msgspec.json.encode(TYPES.get(name, "text"))
        if "role" in kind["properties"]:
            needed["role"] = b'"user"'
        for field, schema in kind["properties"].items():
            for place, value in self.fill(schema):
                yield f".{field}{place}", json_object({**needed, field: value})
        yield ".unknown", self._members()

    def _plain(self, schema: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
        match schema.get("type"):
            case "string":
                yield "", b'"%b"' % (b"x\\n" * (self._size // 3))
            case "array":
                items = schema.get("items", {"type": "integer"})
                least = self._least(items)
                yield "", b"[%b]" % b",".join([least] * (self._size // (len(least) + 1)))
                yield from ((f"[0]{place}", b"[%b]" % value) for place, value in self.fill(items))
            case "object":
                yield "", self._members()
                depth = self._size // 6
                yield " (deep)", b'{"a":' * depth + b"1" + b"}" * depth
            case None:
                yield "", b'"%b"' % (b"x\\n" * (self._size // 3))
                yield " (deep)", b"[" * (self._size // 2) + b"]" * (self._size // 2)

    def _members(self) -> bytes:
        # members of a struct occur repeatedly, others with many names
        return b"{%b}" % b",".join([b'"%d":{"a":1}' % at for at in range(self._size // 16)])

    def _least(self, schema: dict[str, Any]) -> bytes:
        if "$ref" in schema:
            kind = self._kinds[schema["$ref"].rpartition("/")[2]]
            required = kind.get("required", ())
            return json_object({name: self._least(kind["properties"][name]) for name in required})
        return {"string": b'"x"', "array": b"[1]", "object": b"{}", "boolean": b"true"}.get(
            schema.get("anyOf", [schema])[0].get("type"), b"1"
        )


@pytest.mark.timeout(600)
def test_each_field_of_each_endpoint_at_its_limit(server: StallServer) -> None:
    document = server.http.get("/openapi.json").json()
    kinds = document["components"]["schemas"]
    stalls: dict[tuple[str, str, int], float] = {}
    for path, methods in document["paths"].items():
        if "requestBody" not in methods.get("post", {}):
            continue
        schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        fields = kinds[schema["$ref"].rpartition("/")[2]].get("properties", {})
        for name, field in [*fields.items(), ("unknown field", {"type": "array"})]:
            for size in (FAST_INLINE_BYTES - 1024, MAX_BODY_BYTES - 1024):
                for place, value in Filler(kinds, size).fill(field):
                    needed = {other: msgspec.json.encode(each) for other, each in NEEDED[path].items()}
                    stall_s = server.stall_s(path, json_object({**needed, name: value}))
                    case = path, name + place, size
                    stalls[case] = max(stalls.get(case, 0.0), stall_s)
    assert len({path for path, _, _ in stalls}) == len(NEEDED)
    assert len(stalls) > 800
    assert {case: seconds for case, seconds in stalls.items() if seconds > MAX_STALL_S} == {}


def tool(number: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "b" * 5000}}}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters, "strict": True}}


HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "a grammar of many lines": (
        COMPLETION,
        {"structured_outputs": {"grammar": 'root ::= "a"' + "\n" * 64_000}},
    ),
    "a regex": (COMPLETION, {"structured_outputs": {"regex": "((a{1,500}b?){1,500}c?){1,500}"}}),
    "many choices": (COMPLETION, {"structured_outputs": {"choice": [f"choice {at}" for at in range(4000)]}}),
    "messages inline": (CHAT, {"messages": [USER] * INLINE_OBJECTS}),
    "messages": (CHAT, {"messages": [USER] * 400}),
    "tools": (CHAT, {"tools": [tool(at) for at in range(128)], "tool_choice": "required"}),
    "words": (COMPLETION, {"bad_words": ["the quick "] * 1024}),
    "allowed tokens of many choices": (COMPLETION, {"allowed_token_ids": [*range(600)] * 400, "n": 128}),
    "biases of many choices": (COMPLETION, {"logit_bias": {str(at): 1 for at in range(600)}, "n": 128}),
    "stop strings": (
        COMPLETION,
        {
            "prompt": "a" * 200,
            "max_tokens": 40,
            "n": 128,
            "stop": ["a" * 460 + "b" * 50 + str(at) for at in range(2)],
        },
    ),
    "tokens": (COMPLETION, {"prompt": [1] * 100_000}),
    "a text": (COMPLETION, {"prompt": "the quick " * 50_000}),
    "a long prompt of many choices": (COMPLETION, {"prompt": [1] * 30_000, "n": 32}),
    "instructions": (RESPONSES, {"instructions": "the quick " * 20_000, "stream": True}),
}


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE)
def test_large_valid_requests(server: StallServer, case: tuple[str, dict[str, Any]]) -> None:
    path, fields = case
    assert server.stall_s(path, json.dumps({**NEEDED[path], **fields}).encode()) <= MAX_STALL_S


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "c d"}]}}\n</tool_call>\n'
THOUGHT = "<think>" + "the quick brown fox jumps over the lazy dog " * 10_000
MANY = [1 + at % 500 for at in range(5000)]
ANSWERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "log-probabilities of the prompt": (COMPLETION, {"prompt": MANY, "prompt_logprobs": 20}, ""),
    "the same in a chat": (
        CHAT,
        {"messages": [USER | {"content": "x y " * 2000}], "prompt_logprobs": 20},
        "",
    ),
    "an echo with log-probabilities": (COMPLETION, {"prompt": MANY, "echo": True, "logprobs": 20}, ""),
    "the same in a stream": (COMPLETION, {"prompt": MANY, "echo": True, "logprobs": 20, "stream": True}, ""),
    "log-probabilities of many choices": (COMPLETION, {"logprobs": 20, "max_tokens": 64, "n": 128}, ""),
    "log-probabilities of a chat": (CHAT, {"logprobs": True, "top_logprobs": 20, "max_tokens": 3000}, ""),
    "token ids of many choices": (COMPLETION, {"prompt": MANY * 20, "n": 128, "return_token_ids": True}, ""),
    "the same in a stream ": (
        COMPLETION,
        {"prompt": MANY * 20, "n": 128, "return_token_ids": True, "stream": True},
        "",
    ),
    "calls": (CHAT, {"tools": TOOLS, "max_tokens": 100_000}, CALL * 1000),
    "calls of a response": (
        RESPONSES,
        {"tools": [{"type": "function", "name": "f"}], "max_output_tokens": 100_000},
        CALL * 1000,
    ),
    "calls of a message": (MESSAGES, {"tools": [{"name": "f"}], "max_tokens": 100_000}, CALL * 1000),
    "reasoning of a message": (MESSAGES, {"max_tokens": 120_000}, THOUGHT),
    "reasoning of a response": (RESPONSES, {"max_output_tokens": 120_000}, THOUGHT),
    "embeddings": ("/v1/embeddings", {"input": ["x"] * 1000}, ""),
    "scores": ("/score", {"text_1": ["x"] * 400, "text_2": ["y"] * 400}, ""),
    "a ranking": ("/v1/rerank", {"documents": ["x"] * 1000}, ""),
}
"""Requests with large answers, each with the model's text. Without one the model repeats the prompt."""


@pytest.mark.parametrize("case", ANSWERS.values(), ids=ANSWERS)
def test_long_answers(
    server: StallServer, case: tuple[str, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fields, text = case
    monkeypatch.setattr(fake_worker, "embedding_of", lambda token_ids: struct.pack("<1024f", *[0.1] * 1024))
    monkeypatch.setattr(server.worker, "tokens_per_step", 512 // fields.get("n", 1))
    if text:
        token_ids = byte_level_tokenizer().encode(text).ids
        monkeypatch.setattr(server.worker, "finish_reason", "stop")
        monkeypatch.setattr(server.worker, "script", lambda request: token_ids)
    assert server.stall_s(path, json.dumps({**NEEDED[path], **fields}).encode()) <= MAX_STALL_S


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs")],
)
def test_log_probabilities_of_prompts_have_a_limit(
    server: StallServer, fields: dict[str, Any], field: str
) -> None:
    answer = server.http.post(COMPLETION, json={"prompt": MANY * 20, "n": 2, "max_tokens": 1, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert "at most 4194304 log-probabilities of prompts in a request, got 4200000" in error["message"]


VIEWS = ["/requests?limit=1000", "/decisions?limit=1000", "/workers", "/cluster", "/metrics", "/v1/models"]


def test_views_of_many_requests(server: StallServer) -> None:
    body = {**NEEDED[COMPLETION], "n": 128}
    server.worker.hold.set()
    try:
        with ThreadPoolExecutor(12) as threads:
            answers = [threads.submit(server.http.post, COMPLETION, json=body) for _ in range(12)]
            eventually(lambda: len(server.http.get("/requests?limit=1000").json()["requests"]) == 1000)
            stalls = {path: server.stall_s(path, None) for path in VIEWS}
            server.worker.hold.clear()
            assert {answer.result().status_code for answer in answers} == {200}
    finally:
        server.worker.hold.clear()
    assert {path: seconds for path, seconds in stalls.items() if seconds > MAX_STALL_S} == {}


def test_the_largest_bodies(tmp_path: Path) -> None:
    """Uses the product's default limit."""
    size = 16 * 1024 * 1024 - 1024
    user = b'{"role":"user","content":"x"}'
    bodies = {
        COMPLETION: b'{"prompt":"%b"}' % (b"x " * (size // 2)),
        CHAT: b'{"messages":[%b]}' % b",".join([user] * (size // (len(user) + 1))),
        "/detokenize": b'{"tokens":[%b]}' % b",".join([b"1"] * (size // 2)),
    }
    thought = {
        "type": "reasoning",
        "content": [{"type": "reasoning_text", "text": "x " * (size // 2 - 1024)}],
    }
    stored = {**NEEDED[RESPONSES], "input": [thought, {"role": "user", "content": "x"}]}
    server = StallServer(tmp_path)
    try:
        stalls = {path: server.stall_s(path, body) for path, body in bodies.items()}
        answer = server.http.post(RESPONSES, json=stored)
        assert answer.status_code == 200, answer.text
        for view in ("", "/input_items"):
            path = f"{RESPONSES}/{answer.json()['id']}{view}"
            assert server.http.get(path).status_code == 200
            stalls[path] = server.stall_s(path, None)
        stalls[RESPONSES] = server.stall_s(RESPONSES, msgspec.json.encode(stored))
    finally:
        server.close()
    assert {path: seconds for path, seconds in stalls.items() if seconds > MAX_STALL_S} == {}
