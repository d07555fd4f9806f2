"""Defaults of requests: the server's variables of the chat template, and `generation_config.json`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.preprocessing.requests import FAST_INLINE_BYTES
from router.reading.prepared import FILE, GenerationDefaults, load_defaults
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


GIVEN = {"temperature": 0.25, "top_p": 0.5, "top_k": 40, "min_p": 0.125, "repetition_penalty": 1.5}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 9},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 9},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
}


@pytest.fixture
def folder(model_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(model_folder, tmp_path / "model")
    content = {**GIVEN, "max_new_tokens": 3, "do_sample": True, "eos_token_id": [1, 2]}
    (tmp_path / "model" / FILE).write_text(json.dumps(content))
    return tmp_path / "model"


@pytest.mark.parametrize("path", BODIES)
def test_missing_parameters_get_the_defaults(make_router, folder, path):
    router = make_router(model=str(folder))
    worker = router.add_worker()
    answer = router.http.post(path, json=BODIES[path]).json()
    sampling = worker.generated[-1].sampling
    assert {name: getattr(sampling, name) for name in GIVEN} == GIVEN
    assert sampling.max_tokens == 3, "no answer is longer than max_new_tokens"
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)
    router.http.post(path, json={**BODIES[path], "temperature": 0, "top_k": 0})
    sampling = worker.generated[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 0, 0.5)


def test_a_body_read_in_another_process_gets_the_defaults(make_router, folder):
    """Large bodies are read there."""
    router = make_router(prepares=True, model=str(folder))
    worker = router.add_worker()
    answer = router.http.post("/v1/completions", json={"prompt": "Hi " * 20_000, "truncate_prompt_tokens": 4})
    assert answer.status_code == 200, answer.text
    assert worker.generated[-1].sampling.top_k == 40


def test_models_lists_the_defaults(make_router, folder):
    router = make_router(model=str(folder))
    shown = router.http.get("/v1/models").json()["data"][0]
    assert shown["default_sampling_params"] == {**GIVEN, "max_new_tokens": 3}


def test_the_option_chooses_the_source_of_defaults(folder, model_folder, tmp_path):
    def load(model: Path, wanted: str) -> GenerationDefaults:
        return load_defaults(ServeConfig(model=str(model), generation_config=wanted))

    assert load(folder, "vllm") == load(model_folder, "auto") == GenerationDefaults()
    assert load(model_folder, str(folder)) == load(folder, "auto") != GenerationDefaults()
    with pytest.raises(ConfigError, match=f"--generation-config: {tmp_path} has no {FILE}"):
        load(folder, str(tmp_path))
    with pytest.raises(ConfigError, match="--generation-config: must be auto, vllm or a folder, got nowhere"):
        load(folder, "nowhere")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"temperature": "warm"}', r"temperature"),
        ('{"top_p": 0}', r"top_p: must be in \(0, 1\], got 0"),
        ('{"top_k": -2}', r"top_k: must be in \[-1, "),
        ('{"max_new_tokens": 0}', "max_new_tokens: must be at least 1, got 0"),
        ("{", "truncated"),
        ("[]", "Expected `object`"),
    ],
)
def test_a_bad_file_is_named_with_its_field(tmp_path, content, reason):
    (tmp_path / FILE).write_text(content)
    with pytest.raises(ConfigError, match=f"--model: {tmp_path / FILE}: .*{reason}"):
        load_defaults(ServeConfig(model=str(tmp_path)))
