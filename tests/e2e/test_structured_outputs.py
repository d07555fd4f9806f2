"""A grammar is a part of the request: hand-offs and deaths of workers change no token of its text. fp32."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
KILLED = {"prefill-0": "slow:0.02", "decode-0": "KILL:after:after_step:7", "decode-1": ""}


def ask(serving: HttpServing, seed: int, stream: bool = False) -> tuple[list[int], str]:
    """Token ids and text of a chat whose answer is of the schema."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 40}], "response_format": FORMAT}
    body |= {"seed": seed, "temperature": 1.0, "max_tokens": 200, "return_token_ids": True, "stream": stream}
    if not stream:
        answer = serving.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        chunks = [answer.json()]
    else:
        with serving.http.stream("POST", "/v1/chat/completions", json=body) as response:
            chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[-1]["finish_reason"] == "stop", choices[-1]
    text = "".join(choice["delta" if stream else "message"]["content"] for choice in choices)
    jsonschema.validate(json.loads(text), SCHEMA)
    return [token for choice in choices for token in choice.get("token_ids", ())], text


def answers(serving: HttpServing) -> list[tuple[list[int], str]]:
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        return list(pool.map(lambda seed: ask(serving, seed, stream=seed == 2), SEEDS))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[list[int], str]]:
    """Of one worker that does it all, one after the other."""
    with HttpServing(folder, {"decode-0": ""}) as serving:
        found = [ask(serving, seed) for seed in SEEDS]
        stuck = {
            "prompt": "x",
            "max_tokens": 9,
            "structured_outputs": {"regex": "ab"},
            "bad_words": ["b", "ab"],
        }
        answer = serving.http.post("/v1/completions", json=stuck)
        assert answer.status_code == 422, answer.text
        assert answer.json()["error"]["code"] == "grammar"
        serving.wait_empty()
    assert len({text for _, text in found}) == len(SEEDS)
    return found


@pytest.mark.parametrize("workers", [{"prefill-0": "", "decode-0": ""}, KILLED], ids=["split", "killed"])
def test_texts_are_valid_and_the_same(
    folder: Path, expected: list[tuple[list[int], str]], workers: Mapping[str, str]
) -> None:
    with HttpServing(folder, workers) as serving:
        assert answers(serving) == expected
        if workers is KILLED:
            assert serving.metric("tandem_requests_placed_anew_total") > 0
        serving.wait_empty()
        assert serving.metric("tandem_request_failures_total") == 0
