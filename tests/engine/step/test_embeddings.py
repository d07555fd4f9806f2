"""A prompt's embedding is the last layer's normalized state at its last token, however it was computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.engine import Engine
from protocol.errors import InvalidRequestError
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from tests.engine.test_engine import run, tiny_engine
from tests.worker.tiny_model import VOCAB_SIZE, load

LONG = [1 + (7 * place) % (VOCAB_SIZE - 1) for place in range(150)]
PROMPTS = [LONG, LONG[:33], [5], [*LONG[:96], 9]]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[np.ndarray]:
    model = load(folder)
    with torch.inference_mode():
        outputs = [model(torch.tensor([prompt]), output_hidden_states=True) for prompt in PROMPTS]
    states = [output.hidden_states[-1][0, -1] for output in outputs]
    return [torch.nn.functional.normalize(state, dim=0).numpy() for state in states]


def make(folder: Path, **options: object) -> Engine:
    settings = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 20}
    return tiny_engine(folder, **{**settings, "enable_embeddings": True, **options})


def request(name: str, prompt: list[int], embeds: bool = True) -> EngineRequest:
    params = SamplingParams(max_tokens=1 if embeds else 40, temperature=0.0, ignore_eos=True, embeds=embeds)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=params)


@pytest.mark.parametrize(
    ("options", "error"),
    [({}, 1e-5), ({"dtype": "bfloat16", "compile": "auto"}, 3e-2)],
    ids=["float32", "bfloat16"],
)
def test_it_equals_transformers(
    folder: Path, expected: list[np.ndarray], options: dict[str, str], error: float
) -> None:
    """In chunks, beside each other and beside a decoding request, and from the prefix cache."""
    engine = make(folder, **options)
    engine.add(request("text", LONG[10:40], embeds=False))
    for turn in range(2):
        for number, prompt in enumerate(PROMPTS):
            engine.add(request(f"{turn}-{number}", prompt))
    outputs = run(engine)
    for turn in range(2):
        for number, vector in enumerate(expected):
            (output,) = outputs[f"{turn}-{number}"]
            assert output.finish_reason == "length" and output.embedding is not None
            found = np.frombuffer(output.embedding, "<f4")
            assert np.abs(found - vector).max() < error and abs(np.linalg.norm(found) - 1) < 1e-3
    assert outputs["1-0"][0].cached_tokens
    assert len(outputs["text"]) == 40 and not any(output.embedding for output in outputs["text"])


def test_it_needs_the_option(folder: Path) -> None:
    with pytest.raises(InvalidRequestError, match="--enable-embeddings"):
        make(folder, enable_embeddings=False).add(request("0", [5]))
