"""`/v1/completions` through a real server and the `openai` client."""

from __future__ import annotations

import openai
import pytest


@pytest.fixture
def client(router):
    return openai.OpenAI(base_url=router.url + "/v1", api_key="any", max_retries=0)


def test_text_and_usage(client, router):
    answer = client.completions.create(model="test-model", prompt="the quick brown fox", max_tokens=4)
    ids = router.server.state.tokenizer.encode("the quick brown fox")
    expected = router.server.state.tokenizer.decode((ids * 4)[:4])
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == (expected, "length", 0)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "test-model"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 4)
    assert answer.usage.total_tokens == len(ids) + 4
    assert answer.usage.prompt_tokens_details.cached_tokens == 5


def test_stream_equals_whole(client):
    options = {"model": "test-model", "prompt": "naïve 🙂 日本語 text", "max_tokens": 60}
    whole = client.completions.create(**options).choices[0]
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len(chunks) > 10
    assert len({chunk.id for chunk in chunks}) == 1
