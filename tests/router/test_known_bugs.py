"""Faults of other servers when one message has several tokens. Numbers follow our reference list."""

from __future__ import annotations

import json
from typing import Any

import pytest

PROMPT = "the quick brown fox jumps over the lazy dog"
COMPLETION = {"prompt": PROMPT, "logprobs": 1, "return_token_ids": True}
CHAT = {
    "messages": [{"role": "user", "content": PROMPT}],
    "logprobs": True,
    "top_logprobs": 1,
    "return_token_ids": True,
}
ENDPOINTS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


def answer(make_router, path: str, tokens_per_step: int, stream: bool, stop: str) -> dict[str, Any]:
    """Return text, token ids, log-probabilities, reasons and usage, put together if they were streamed."""
    router = make_router()
    router.add_worker(tokens_per_step=tokens_per_step)
    body = {**ENDPOINTS[path], "max_tokens": 40, "stop": stop, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    response = router.http.post(path, json=body)
    assert response.status_code == 200, response.text
    if not stream:
        return joined([response.json()])
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return joined([json.loads(line) for line in lines if line != "[DONE]"])


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": []}
    for part in parts:
        if part.get("usage"):
            found["completion_tokens"] = part["usage"]["completion_tokens"]
        for choice in part["choices"]:
            message = choice.get("message") or choice.get("delta") or {}
            found["text"] += choice.get("text") or message.get("content") or ""
            found["token_ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            entries = logprobs.get("content") or [
                {"token": token, "logprob": logprob}
                for token, logprob in zip(
                    logprobs.get("tokens", []), logprobs.get("token_logprobs", []), strict=True
                )
            ]
            found["logprobs"] += [(entry["token"], entry["logprob"]) for entry in entries]
            if choice.get("finish_reason"):
                found["finish_reason"] = choice["finish_reason"]
                found["stop_reason"] = choice.get("stop_reason")
    return found


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["fox", "own fox ju", " over the"])
def test_bug_10_a_stop_string_cuts_all_parts_of_an_answer_alike(make_router, path, stream, stop):
    one_by_one = answer(make_router, path, 1, stream, stop)
    at_once = answer(make_router, path, 40, stream, stop)
    assert at_once == one_by_one
    assert stop not in at_once["text"] and at_once["finish_reason"] == "stop"
    assert at_once["stop_reason"] == stop
    assert at_once["completion_tokens"] == len(at_once["token_ids"]) == len(at_once["logprobs"]) < 40
