"""Required calls of a random model have arguments that match their schema, even if a worker dies. fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serving import HttpServing

TEMPLATE = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
SIGNS = {
    "hermes": '<tool_call>{"name": ... </think>',
    "glm47": "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n",
}
KILLED = {"decode-0": "KILL:after:after_step:9", "decode-1": ""}
"""The first worker dies in the middle of a call's arguments."""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
ASKED: Any = {
    "model": "model",
    "messages": [{"role": "user", "content": "?"}],
    "tools": TOOLS,
    "max_tokens": 200,
}


@pytest.fixture(scope="module", params=SIGNS)
def template(folder: Path, request: pytest.FixtureRequest) -> str:
    path = folder / "tools.jinja"
    path.write_text(f"{TEMPLATE}{{# {SIGNS[request.param]} #}}")
    return str(path)


@pytest.fixture(scope="module")
def client(folder: Path, template: str) -> Iterator[openai.OpenAI]:
    with (
        HttpServing(folder, KILLED, chat_template=template) as serving,
        openai.OpenAI(base_url=f"{serving.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client
        assert serving.metric("tandem_requests_placed_again_total") > 0
        assert serving.metric("tandem_request_failures_total") == 0


@pytest.mark.parametrize("choice", ["required", WEATHER])
def test_required_calls_have_valid_arguments(client: openai.OpenAI, choice: Any) -> None:
    def ask(seed: int) -> None:
        asked = {**ASKED, "tool_choice": choice, "seed": seed}
        (told,) = client.chat.completions.create(**asked).choices
        assert told.finish_reason == "tool_calls" and not told.message.content
        assert told.message.tool_calls
        (call,) = told.message.tool_calls
        check(call.function.name, call.function.arguments, choice)
        name, arguments = "", ""
        for chunk in client.chat.completions.create(**asked, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or ():
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
        assert (name, arguments) == (call.function.name, call.function.arguments)

    with ThreadPoolExecutor() as pool:
        list(pool.map(ask, range(4)))


def check(name: str, arguments: str, choice: Any) -> None:
    told = json.loads(arguments)
    if name == "weather":
        assert set(told) == {"city", "days"} and told["city"] in ("Paris", "Rome")
        assert isinstance(told["days"], int) and told["days"] <= 9
    else:
        assert (name, told) == ("now", {}) and choice == "required"
