"""A draft model's trees in an engine: the same tokens as without, and the draft's KV where it belongs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.kv.layout import DRAFT, TARGET
from protocol.config import ServeConfig
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from speculation import tree_drafting
from speculation.speculator import speculate
from tests.speculation.small_engine import INTERPRETED
from tests.worker.tiny_model import VOCAB_SIZE, load, write_tiny_llama

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 6, "top_p": 0.8, "repetition_penalty": 1.3},
    {"temperature": 0.7, "seed": 7, "top_k": 10, "min_p": 0.02},
    {"temperature": 0.0, "min_tokens": 8},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with other weights, but not very: it is often right."""
    folder = tmp_path_factory.mktemp("draft")
    model = load(target)
    torch.manual_seed(1)
    for weights in model.parameters():
        weights.data += torch.randn_like(weights) * weights.std() * 0.08
    model.save_pretrained(folder)
    return folder


def make_engine(
    target: Path, draft: Path | None, tree_nodes: int = 12, num_blocks: int = 64, **options: Any
) -> Engine:
    config = ServeConfig(
        model=str(target),
        dtype="float32",
        device="cpu",
        compile="off",
        max_model_len=256,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        kv_cache_memory_bytes=num_blocks * BLOCK_BYTES * (1 if draft is None else 2),
    )
    if draft is not None:
        speculative = SpeculativeConfig(
            method="draft_model",
            model=str(draft),
            tree=True,
            num_speculative_tokens=tree_nodes,
            max_speculative_tokens=5,
        )
        config = replace(config, speculative_config=speculative)
    return Engine(replace(config, **options), speculate=speculate)


def requests(num_tokens: int = 24) -> list[EngineRequest]:
    rng = random.Random(0)
    shared = [rng.randrange(1, VOCAB_SIZE) for _ in range(40)]
    return [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=shared[: 40 - 7 * index] + [rng.randrange(1, VOCAB_SIZE) for _ in range(9)],
            sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True, **sampling),
        )
        for index, sampling in enumerate(SAMPLINGS)
    ]


def run(engine: Engine, asked: list[EngineRequest]) -> tuple[dict[str, list[int]], list[TokenOutput]]:
    for request in asked:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in asked}
    outputs = []
    while engine.has_work():
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
            outputs.append(output)
    return tokens, outputs


@pytest.fixture(scope="module")
def plain(target: Path) -> dict[str, list[int]]:
    return run(make_engine(target, None), requests())[0]


@pytest.mark.parametrize("tree_nodes", [1, 4, 12, 32])
def test_tokens_are_those_without(
    target: Path, draft: Path, plain: dict[str, list[int]], tree_nodes: int
) -> None:
    engine = make_engine(target, draft, tree_nodes)
    tokens, outputs = run(engine, requests())
    assert tokens == plain
    assert sum(output.accepted_tokens for output in outputs) > 0
    assert engine.blocks.available == engine.blocks.num_blocks


def test_preemption_and_prefix_hits_change_nothing(target: Path, draft: Path) -> None:
    expected, _ = run(make_engine(target, None), requests(num_tokens=45))
    engine = make_engine(target, draft, num_blocks=9, max_model_len=96)
    for _ in range(2):
        assert run(engine, requests(num_tokens=45))[0] == expected
    assert engine.stats().num_preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0


def test_a_draft_that_knows_the_target_is_right_to_the_last_token(target: Path) -> None:
    """Under sampling too, since it ranks by the noise that the target draws with; but for a path that looked
    unlikely."""
    engine = make_engine(target, target)
    _, outputs = run(engine, requests()[:2])
    drafted = [output for output in outputs if output.drafted_tokens > 5]
    assert len(drafted) > 4
    assert sum(output.accepted_tokens for output in drafted) > 4.5 * len(drafted)


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=INTERPRETED)])
def test_the_drafts_kv_is_that_of_the_committed_tokens(
    target: Path, draft: Path, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step, place by place: a draft model that reads the text anew gets the same. Where trees grow
    on the device, the host does not know which of their nodes were run.
    """
    monkeypatch.setattr(tree_drafting, "stays_on_device", lambda *_: on_device)
    engine, fresh = make_engine(target, draft), make_engine(draft, None)
    request = requests()[1]
    engine.add(request)
    tokens = list(request.prompt_token_ids)
    num_compared = 0
    while True:
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
        if not engine.has_work():
            break
        num_drafted = engine.draft_state(request.request_id).num_tokens
        if num_drafted == 0:
            continue  # the prompt is read with the first draft
        assert len(tokens) - 2 <= num_drafted < len(tokens)
        (blocks,) = engine.sequences[request.request_id].held.blocks
        ours = places(engine.pool.segment(DRAFT), blocks, num_drafted)
        torch.testing.assert_close(ours, read_anew(fresh, tokens[:num_drafted]), atol=1e-4, rtol=1e-4)
        num_compared += 1
    assert num_compared > 4


def places(segment: Tensor, blocks: list[int], count: int) -> Tensor:
    """[places, num_layers, 2, num_kv_heads, head_dim]."""
    return segment[blocks].movedim(3, 1).flatten(0, 1)[:count]


def read_anew(engine: Engine, token_ids: list[int]) -> Tensor:
    request = EngineRequest(
        request_id="fresh",
        prompt_token_ids=token_ids,
        sampling=SamplingParams(max_tokens=2, temperature=0.0),
    )
    engine.add(request, prefill_only=True)
    engine.step()
    while len(blocks := engine.computed("fresh")[0].blocks) * 16 < len(token_ids):
        engine.step()
    values = places(engine.pool.segment(TARGET), blocks, len(token_ids)).clone()
    engine.abort("fresh")
    return values
