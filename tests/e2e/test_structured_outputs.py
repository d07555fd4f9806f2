"""Hand-offs and deaths of workers change no token of an answer that a grammar constrains. fp32."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.e2e.serving import HttpServing

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[a-f0-9]{8}$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 3},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["id", "tags", "note"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
SEEDS = [1, 2, 3]
RULES = [f"r{number}" for number in range(100)]
AMBIGUOUS = "\n".join(
    [f'start: "[" ({" | ".join(RULES)}) "]"', *(f'{rule}: "a" {rule} | "a"' for rule in RULES)]
)
"""A grammar that takes more work with each token, until it exceeds the limit."""
KILLED = {"prefill-0": "slow:0.02", "decode-0": "KILL:after:after_step:7", "decode-1": ""}


def ask(serving: HttpServing, seed: int, stream: bool = False) -> tuple[list[int], str]:
    """Return token ids and text of a chat, whose answer must match the schema."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 40}], "response_format": FORMAT}
    body |= {"seed": seed, "temperature": 1.0, "max_tokens": 200, "return_token_ids": True, "stream": stream}
    if not stream:
        answer = serving.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        chunks = [answer.json()]
    else:
        chunks = serving.events("/v1/chat/completions", body)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[-1]["finish_reason"] == "stop", choices[-1]
    text = "".join(choice["delta" if stream else "message"]["content"] for choice in choices)
    jsonschema.validate(json.loads(text), SCHEMA)
    return [token for choice in choices for token in choice.get("token_ids", ())], text


def answers(serving: HttpServing) -> list[tuple[list[int], str]]:
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        return list(pool.map(lambda seed: ask(serving, seed, stream=seed == 2), SEEDS))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[HttpServing]:
    """Start a server with one worker."""
    with HttpServing(folder, {"decode-0": ""}) as serving:
        yield serving


@pytest.fixture(scope="module")
def expected(alone: HttpServing) -> list[tuple[list[int], str]]:
    """Return the answers of one worker, one after another."""
    found = [ask(alone, seed) for seed in SEEDS]
    alone.wait_empty()
    assert len({text for _, text in found}) == len(SEEDS)
    return found


PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
STUCK: dict[str, dict[str, Any]] = {
    "at its first token": {"structured_outputs": {"regex": "ab"}, "bad_words": ["a", "ab"]},
    "in the middle": {"structured_outputs": {"regex": "ab"}, "bad_words": ["b", "ab"]},
    "at a bound of the work": {"structured_outputs": {"grammar": AMBIGUOUS}, "bad_words": ["]"], "seed": 1},
}


def question(path: str, fields: dict[str, Any], stream: bool) -> dict[str, Any]:
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
    asked = {name: "x"} if name else {"messages": [{"role": "user", "content": "x"}]}
    most = "max_output_tokens" if name == "input" else "max_tokens"
    return {**asked, most: 300, "stream": stream, **fields}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", STUCK)
def test_a_grammar_that_exceeds_its_limit_ends_an_answer_with_an_error(
    alone: HttpServing, path: str, case: str
) -> None:
    answer = alone.http.post(path, json=question(path, STUCK[case], stream=False))
    assert answer.status_code == 422, answer.text
    found = answer.json()
    assert found["error"]["code"] == "grammar"
    assert "no token may follow its" in found["error"]["message"]
    assert ("items" in found["error"]["message"]) == (case == "at a bound of the work")
    if path == "/v1/responses":
        assert (found["status"], found["usage"]) == ("failed", None)
    else:
        assert [choice["finish_reason"] for choice in found["choices"]] == ["error"]
    alone.wait_empty()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case", STUCK)
def test_a_grammar_that_exceeds_its_limit_ends_a_stream_with_an_error(
    alone: HttpServing, path: str, case: str
) -> None:
    with alone.http.stream("POST", path, json=question(path, STUCK[case], stream=True)) as response:
        lines = list(response.iter_lines())
    if response.status_code == 422:  # the error came before the stream began
        found = json.loads("".join(lines))
        assert found["error"]["code"] == "grammar"
        assert path == "/v1/responses" or found["choices"][0]["finish_reason"] == "error"
        return
    assert response.status_code == 200 and case != "at its first token"
    *_, last, failure = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    if path == "/v1/responses":
        assert (failure["type"], failure["response"]["status"]) == ("response.failed", "failed")
        assert "no token may follow its" in failure["response"]["error"]["message"]
        assert failure["response"]["output"][0]["status"] == "incomplete"
    else:
        assert last["choices"][0]["finish_reason"] == "error"
        assert failure["error"]["code"] == "grammar"
    assert "data: [DONE]" not in lines
    alone.wait_empty()


@pytest.mark.parametrize("workers", [{"prefill-0": "", "decode-0": ""}, KILLED], ids=["split", "killed"])
def test_texts_are_valid_and_equal_on_all_deployments(
    folder: Path, expected: list[tuple[list[int], str]], workers: Mapping[str, str]
) -> None:
    with HttpServing(folder, workers) as serving:
        assert answers(serving) == expected
        if workers is KILLED:
            assert serving.metric("tandem_requests_placed_again_total") > 0
        serving.wait_empty()
        assert serving.metric("tandem_request_failures_total") == 0
