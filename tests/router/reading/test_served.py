"""A request without sampling parameters gets the defaults of the model's `generation_config.json`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.reading.prepared import FILE, GenerationDefaults, load_defaults

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
