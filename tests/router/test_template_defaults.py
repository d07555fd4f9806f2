"""Variables that the server sets for all chats, unless a request sets them."""

from __future__ import annotations

from typing import Any

import pytest

from router.preprocessing.requests import FAST_INLINE_BYTES
from tests.router.scripted import ASK, Scripted

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}|{{ reasoning_effort }}|{{ extra }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
)
VARIABLES = {"enable_thinking": False, "mood": "calm", "reasoning_effort": "low", "unread": 1}
DEFAULTS = "calm|low|<think></think>"
QUESTION = ASK[0]["content"]


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Start a router that turns thinking off by default."""
    folder = tmp_path_factory.mktemp("models") / "calm"
    scripted = Scripted(folder, TEMPLATE, default_chat_template_kwargs=VARIABLES)
    yield scripted
    scripted.close()


def prompt_of(calm: Scripted, path: str, **fields: Any) -> str:
    """Return the end of the prompt that a request to this endpoint gets."""
    asked = {"input": QUESTION} if path == "/v1/responses" else {"messages": ASK}
    if path == "/v1/messages":
        asked["max_tokens"] = 20
    answer = calm.router.http.post(path, json={**asked, **fields})
    assert answer.status_code == 200, answer.text
    if path == "/tokenize":
        return calm.tokenizer.decode(answer.json()["tokens"], False).removeprefix(QUESTION)
    return calm.prompt.removeprefix(QUESTION)


PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize")


@pytest.mark.parametrize("path", PATHS)
def test_every_endpoint_of_chats_has_the_defaults(calm, path):
    assert prompt_of(calm, path) == DEFAULTS


def test_a_body_that_the_preprocessor_reads_has_the_defaults(calm):
    assert prompt_of(calm, "/v1/chat/completions", padding="x" * FAST_INLINE_BYTES) == DEFAULTS


@pytest.mark.parametrize("path", PATHS)
def test_a_requests_own_win_name_by_name(calm, path):
    own = {"enable_thinking": True, "extra": "!", "reasoning_effort": None}
    assert prompt_of(calm, path, chat_template_kwargs=own) == "calm|None|!<think>"


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/chat/completions", {"reasoning_effort": "high"}, "calm|high|<think></think>"),
        ("/v1/responses", {"reasoning": {"effort": "high"}}, "calm|high|<think></think>"),
        ("/v1/messages", {"thinking": {"type": "enabled"}}, "calm|low|<think>"),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, DEFAULTS),
    ],
)
def test_fields_that_set_variables_win_too(calm, path, fields, expected):
    assert prompt_of(calm, path, **fields) == expected


def test_counted_tokens_are_those_of_the_prompt(calm):
    counted = [
        calm.router.http.post("/v1/messages/count_tokens", json={"messages": ASK, **fields}).json()
        for fields in ({}, {"thinking": {"type": "enabled"}})
    ]
    wanted = [DEFAULTS, "calm|low|<think>"]
    tokens = [len(calm.tokenizer.encode(QUESTION + each, add_special_tokens=False)) for each in wanted]
    assert [each["input_tokens"] for each in counted] == tokens


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_begins_in_thinking_only_if_the_prompt_opens_it(calm, stream):
    message, _ = calm.message("Yes.", stream)
    assert message["content"] == "Yes." and "reasoning_content" not in message
    own = {"chat_template_kwargs": {"enable_thinking": True}}
    message, _ = calm.message("Hm.</think>Yes.", stream, extra_body=own)
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")


def test_requests_leave_the_defaults_alone(calm):
    prompt_of(calm, "/tokenize", chat_template_kwargs={"mood": "wild"})
    assert prompt_of(calm, "/tokenize") == DEFAULTS
