"""`langchain-openai`: chats, responses, structured outputs, tools and embeddings."""

from typing import Any

import langchain_openai as langchain
from answers import Event, Weather
from common import API, TEXTS

options: Any = {"model": "model", "base_url": API, "api_key": "none", "max_retries": 0}
chat = langchain.ChatOpenAI(**options, seed=1, max_tokens=8)
answer = chat.invoke("Hello")
assert answer.content and answer.usage_metadata["output_tokens"] == 8
assert "".join(chunk.content for chunk in chat.stream("Hello")) == answer.content
roomy = langchain.ChatOpenAI(**options, seed=1, max_tokens=200)
(call,) = roomy.bind_tools([Weather], tool_choice="Weather").invoke("Is it raining?").tool_calls
assert call["name"] == "Weather" and Weather(**call["args"])
for method in ("json_schema", "function_calling"):
    assert isinstance(roomy.with_structured_output(Event, method=method).invoke("When?"), Event)
response = langchain.ChatOpenAI(**options, max_tokens=200, use_responses_api=True)
assert isinstance(response.with_structured_output(Event).invoke("When?"), Event)
(call,) = response.bind_tools([Weather], tool_choice="Weather").invoke("Is it raining?").tool_calls
assert Weather(**call["args"])
assert "".join(chunk.text for chunk in response.bind(max_output_tokens=8).stream("Hello"))
embedder = langchain.OpenAIEmbeddings(
    model="model", base_url=API, api_key="none", check_embedding_ctx_length=False
)
assert len(embedder.embed_documents(TEXTS)) == 2
