"""The heads that come with the bundled target: small, in the published layout, and worth their while."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from transformers import AutoTokenizer

from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from speculation.speculator import speculate

MODELS = Path(__file__).parents[2] / "models"
TARGET, MEDUSA = MODELS / "tandem-code-10m", MODELS / "tandem-code-10m-medusa"
NUM_PROMPTS = 4
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = (MODELS / "heldout_prompts.jsonl").read_text("utf-8").splitlines()[:NUM_PROMPTS]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    return [
        EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params)
        for number, prompt in enumerate(prompts)
    ]


def generate(
    requests: list[EngineRequest], speculative: SpeculativeConfig | None
) -> tuple[list[list[int]], float]:
    """The outputs, and the mean number of tokens of a step."""
    config = ServeConfig(model=str(TARGET), dtype="float32", device="cpu", compile="off")
    config = msgspec.structs.replace(config, speculative_config=speculative, kv_cache_memory_bytes=32 << 20)
    engine = Engine(config, speculate=speculate if speculative is not None else None)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    steps = 0
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
            steps += 1
    return list(tokens.values()), sum(map(len, tokens.values())) / steps


@pytest.mark.parametrize(("tree", "num_tokens"), [(False, 3), (True, 16)])
def test_medusa_heads_bring_tokens_and_change_none(
    requests: list[EngineRequest], tree: bool, num_tokens: int
) -> None:
    options = SpeculativeConfig(
        method="medusa", model=str(MEDUSA), tree=tree, num_speculative_tokens=num_tokens
    )
    plain, _ = generate(requests, None)
    speculated, per_step = generate(requests, options)
    assert speculated == plain
    assert per_step > (1.3 if tree else 1.2)


def test_they_are_small_and_have_a_card() -> None:
    assert (MEDUSA / "model.safetensors").stat().st_size < 2 << 20
    assert "accepted, with all before it" in (MEDUSA / "README.md").read_text()
    config = json.loads((MEDUSA / "config.json").read_text())
    assert len(config["rank_acceptance"]) == config["num_heads"] >= 3
