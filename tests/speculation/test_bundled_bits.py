"""The bundled model in bfloat16 with the native kernels: speculation changes no bit of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from deploy.config import load_config
from engine.devices.cpu.attention.backend import build_fault
from engine.engine import Engine
from engine.linear.packed import kernel_fault
from protocol.outputs import TokenLogprobs
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from speculation.speculator import BatchSpeculator
from tests.speculation.engines import MODELS, TARGET

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    kernel_fault(CPU, torch.bfloat16) is not None or build_fault() is not None,
    reason="this machine can't build the kernels",
)

METHODS: list[dict[str, Any]] = [
    {"method": "draft_model", "num_speculative_tokens": 4},
    {"method": "draft_model", "num_speculative_tokens": 3, "tree": True},
    {"method": "medusa", "num_speculative_tokens": 4, "tree": True},
    {"method": "eagle", "num_speculative_tokens": 4, "tree": True},
    {"method": "self_speculative", "num_speculative_tokens": 4},
]


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    """Make requests whose trees begin at various places of a tile of keys, and cross tiles."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = (MODELS / "heldout_prompts.jsonl").read_text("utf-8").splitlines()[:4]
    prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    return [
        EngineRequest(
            request_id=f"r{i}",
            prompt_token_ids=prompt[: 90 + 37 * i],
            sampling=SamplingParams(
                max_tokens=48, ignore_eos=True, logprobs=2, temperature=0.7 * (i % 2), seed=i
            ),
        )
        for i, prompt in enumerate(prompts)
    ]


Answers = dict[str, list[tuple[int, TokenLogprobs]]]


def answers(speculative: dict[str, Any] | None, requests: list[EngineRequest]) -> Answers:
    """Return tokens with their log-probabilities, by request."""
    flags: dict[str, Any] = {"model": str(TARGET), "dtype": "bfloat16", "device": "cpu"}
    flags["kv_cache_memory_bytes"] = 32 << 20
    flags["speculative_config"] = json.dumps(speculative or {"method": "none"})
    engine = Engine(load_config(flags, environ={}), speculate=BatchSpeculator)
    for request in requests:
        engine.add(request)
    found: Answers = {}
    while engine.has_work():
        for output in engine.step().outputs:
            pairs = zip(output.token_ids, output.logprobs or [], strict=True)
            found.setdefault(output.request_id, []).extend(pairs)
    accepted = [n for name, n in engine.counters().items() if "accepted_tokens_total" in name]
    assert not speculative or sum(accepted) > 0
    return found


@pytest.fixture(scope="module")
def plain(requests: list[EngineRequest]) -> Answers:
    return answers(None, requests)


@pytest.mark.parametrize("speculative", METHODS, ids=lambda config: "-".join(map(str, config.values())))
def test_speculation_changes_no_bit(
    speculative: dict[str, Any], requests: list[EngineRequest], plain: Answers
) -> None:
    assert answers(speculative, requests) == plain
