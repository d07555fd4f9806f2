"""`litellm` with its OpenAI and vLLM providers, and with Anthropic messages."""

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
from answers import Event, Weather
from common import API, ASK, TEXTS, TOOL, URL

for provider in ("openai", "hosted_vllm"):
    asked: Any = {"model": f"{provider}/model", "api_base": API, "api_key": "none", "seed": 1}
    answer = litellm.completion(**asked, messages=ASK, max_tokens=8)
    text = answer.choices[0].message.content
    assert text and answer.usage.completion_tokens == 8
    chunks = litellm.completion(**asked, messages=ASK, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    called = litellm.completion(**asked, messages=ASK, tools=[TOOL], tool_choice="required")
    assert Weather.model_validate_json(called.choices[0].message.tool_calls[0].function.arguments)
    formed = litellm.completion(**asked, messages=ASK, response_format=Event)
    assert Event.model_validate_json(formed.choices[0].message.content)
common: Any = {"api_base": API, "api_key": "none"}
response = litellm.responses(model="openai/model", **common, input="Hello", max_output_tokens=8)
assert response.output[0].content[0].text
assert len(litellm.embedding(model="openai/model", **common, input=TEXTS).data) == 2
ranked = litellm.rerank(
    model="hosted_vllm/model", api_base=URL, api_key="none", query=TEXTS[0], documents=TEXTS, top_n=1
)
assert ranked.results[0]["index"] == 0
message = litellm.completion(
    model="anthropic/model", api_base=URL, api_key="none", messages=ASK, max_tokens=8
)
assert message.choices[0].message.content
