"""Programs written for OpenAI's or Anthropic's API run unchanged against a random model."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from tests.e2e.clients.answers import Event, Weather
from tests.e2e.environments import node_with, python_with
from tests.e2e.serving import HttpServing

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    '{# tools <tool_call>{"name": ... #}'
)
ASK: Any = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": "When do we meet?"}]
COMMON: Any = {"model": "model", "temperature": 1.0}


TOOL: Any = openai.pydantic_function_tool(Weather, name="weather")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    template = folder / "tools.jinja"
    template.write_text(TEMPLATE)
    with HttpServing(folder, chat_template=str(template), enable_embeddings=True) as serving:
        yield f"{serving.url}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_chats_whole_and_streamed(client: openai.OpenAI) -> None:
    asked = {**COMMON, "messages": ASK, "max_tokens": 24, "seed": 1}
    answer = client.chat.completions.create(**asked)
    text = answer.choices[0].message.content
    assert text and answer.usage and answer.usage.completion_tokens == 24
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage and chunks[-1].usage.total_tokens == answer.usage.total_tokens
    with client.chat.completions.stream(**asked) as stream:
        assert "".join(event.delta for event in stream if event.type == "content.delta") == text
    answers = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=2)
    assert len(answers.choices) == 2 and answers.choices[0].message.content == text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prediction_is_drafted_from_and_changes_no_token(client: openai.OpenAI, temperature: float) -> None:
    """Each request has its own cache salt and so finds no earlier output: all drafts come from the
    prediction.
    """
    more: Any = {"ignore_eos": True, "speculative": {"num_speculative_tokens": 4}}
    asked: Any = {"model": "model", "messages": ASK, "temperature": temperature, "seed": 4, "max_tokens": 64}
    plain = client.chat.completions.create(**asked, extra_body={"ignore_eos": True}).choices
    accepted = []
    for predicted in (plain[0].message.content, "Nothing like it."):
        answer = client.chat.completions.create(
            **asked,
            prediction={"type": "content", "content": [{"type": "text", "text": predicted}]},
            extra_body={**more, "cache_salt": f"{temperature} {predicted}"},
        )
        assert answer.choices == plain
        accepted.append(answer.usage.completion_tokens_details.accepted_prediction_tokens)
    assert accepted[0] > accepted[1] + 4, accepted


def test_completions_and_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["model"]
    answer = client.completions.create(model="model", prompt="Say this", max_tokens=5, seed=1)
    assert answer.choices[0].text
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=ASK)


def test_structured_outputs(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(**COMMON, messages=ASK, response_format=Event, seed=seed)
        assert isinstance(answer.choices[0].message.parsed, Event)
        response = client.responses.parse(**COMMON, input=ASK, text_format=Event, extra_body={"seed": seed})
        assert response.output_parsed == answer.choices[0].message.parsed, "one path, one answer"
    with client.chat.completions.stream(**COMMON, messages=ASK, response_format=Event) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Event)
    with client.responses.stream(**COMMON, input=ASK, text_format=Event) as events:
        assert isinstance(events.get_final_response().output_parsed, Event)


def test_a_tool_is_called_and_answers(client: openai.OpenAI) -> None:
    messages = list(ASK)
    asked: Any = {**COMMON, "tools": [TOOL]}
    answer = client.chat.completions.parse(**asked, messages=messages, tool_choice="required")
    message = answer.choices[0].message
    assert message.tool_calls and answer.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    last = client.chat.completions.create(**asked, messages=messages, max_tokens=8, tool_choice="none")
    assert last.choices[0].message.content


def test_responses_with_a_tool(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOL["function"]}
    asked: Any = {**COMMON, "tools": [tool], "tool_choice": "required"}
    first = client.responses.create(**asked, input="Is it raining?", instructions="Be short.")
    (call,) = first.output
    assert call.type == "function_call" and Weather.model_validate_json(call.arguments)
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    second = client.responses.create(
        **COMMON, input=output, previous_response_id=first.id, max_output_tokens=8, extra_body={"seed": 5}
    )
    items: Any = [{"role": "user", "content": "Is it raining?"}, *first.output, *output]
    again = client.responses.create(**COMMON, input=items, max_output_tokens=8, extra_body={"seed": 5})
    assert second.output_text == again.output_text and second.status == "incomplete"
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)


TEXTS = ["the quick brown fox", "def main():"]


@pytest.fixture(scope="module")
def vectors(client: openai.OpenAI, reference: PreTrainedModel, folder: Path) -> list[list[float]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for text in TEXTS:
        with torch.inference_mode():
            output = reference(torch.tensor([tokenizer(text).input_ids]), output_hidden_states=True)
        found.append(torch.nn.functional.normalize(output.hidden_states[-1][0, -1], dim=0).tolist())
    return found


def test_embeddings(client: openai.OpenAI, vectors: list[list[float]]) -> None:
    answer = client.embeddings.create(model="model", input=TEXTS)
    for each, vector in zip(answer.data, vectors, strict=True):
        assert each.embedding == pytest.approx(vector, abs=1e-4)


CLIENTS: dict[str, list[str]] = {
    "use_anthropic.py": [],
    "use_litellm.py": [],
    "use_langchain.py": ["langchain-openai==1.7.4"],
    "use_llama_index.py": ["llama-index-llms-openai-like==0.8.1"],
    "use_pydantic_ai.py": ["pydantic-ai-slim[openai]==2.68.0"],
    "use_instructor.py": ["instructor==1.17.0"],
    "use_smolagents.py": ["smolagents[openai]==1.26.0"],
    "use_openai_agents.py": ["openai-agents==0.24.0"],
    "use_lm_eval.py": ["lm-eval[api]==0.4.13", "transformers"],
    "use_llm.py": ["llm==0.36"],
    "use_openai.mjs": ["openai@6.49.0"],
    "use_ai.mjs": ["ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7"],
}
"""Programs in `clients/`, and the packages that each needs in addition to the tests' own or in
place of them.
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", CLIENTS)
def test_a_client(url: str, folder: Path, tmp_path: Path, program: str) -> None:
    packages, script = CLIENTS[program], Path(__file__).with_name("clients") / program
    if script.suffix == ".mjs":
        script = Path(shutil.copy(script, node_with(packages)))  # the script imports its neighbours
        command = ["node"]
    else:
        command = [str(python_with(packages))]
    ran = subprocess.run(
        [*command, script, url.removesuffix("/v1"), folder],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
