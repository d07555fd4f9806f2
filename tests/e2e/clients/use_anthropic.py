"""`anthropic`: whole and streamed messages, tools, and token counts."""

from typing import Any

import anthropic
from answers import Weather
from common import SCHEMA, URL

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
asked: Any = {"model": "model", "messages": [{"role": "user", "content": "Is it raining?"}]}
seeded: Any = {**asked, "max_tokens": 12, "extra_body": {"seed": 1}}
answer = client.messages.create(**seeded)
assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 12
with client.messages.stream(**seeded) as stream:
    assert "".join(stream.text_stream) == answer.content[0].text
tools: Any = [{"name": "weather", "input_schema": SCHEMA, "strict": True}]
called = client.messages.create(
    **asked, max_tokens=100, tools=tools, tool_choice={"type": "tool", "name": "weather"}
)
assert called.stop_reason == "tool_use" and Weather.model_validate(called.content[-1].input)
usage = called.usage
num_input = client.messages.count_tokens(**asked, tools=tools).input_tokens
assert num_input == usage.input_tokens + (usage.cache_read_input_tokens or 0)
