"""Trees through a whole model: a node's logits are those of its path, read as a text of its own."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention.select import available_backends, backend_of
from engine.draft import Draft
from engine.forward import Forward
from engine.kv_pool import KVPool
from engine.loader import load_model
from engine.pool_layout import TARGET, PoolLayout
from engine.rows import SequenceRows
from engine.runner import Runner
from protocol.config import ServeConfig
from tests.worker.tiny_model import VOCAB_SIZE, load, write_tiny_llama

CPU = torch.device("cpu")
BLOCK_SIZE = 16
RNG = random.Random(3)
PROMPT = [RNG.randrange(1, VOCAB_SIZE) for _ in range(37)]
OTHER = [RNG.randrange(1, VOCAB_SIZE) for _ in range(90)]
PARENTS = [-1, -1, 0, 0, 1, 2, 5, -1, 4, 8, 8]
DRAFT = Draft([RNG.randrange(1, VOCAB_SIZE) for _ in PARENTS], PARENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load(folder)


@pytest.fixture(params=available_backends(CPU))
def runner(folder: Path, request: pytest.FixtureRequest) -> Runner:
    loaded = load_model(ServeConfig(model=str(folder), dtype="float32", device="cpu", compile="off"))
    pool = KVPool(PoolLayout((loaded.kv_group,), BLOCK_SIZE), 32, CPU, None)
    return Forward(loaded.model, backend_of(request.param)(pool.layers(TARGET)), "off", products="torch")


def path_to(node: int) -> list[int]:
    return [] if node < 0 else [*path_to(DRAFT.parent(node)), DRAFT.token_ids[node]]


def last_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0, -1]


def assert_nodes_right(model: PreTrainedModel, logits: Tensor, nodes: range) -> None:
    expected = torch.stack([last_logits(model, PROMPT + path_to(node)) for node in nodes])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_tree_beside_a_prompt_and_a_decode_row(runner: Runner, reference: PreTrainedModel) -> None:
    blocks, others, third = list(range(5)), list(range(8, 14)), [20, 21]
    runner.run([SequenceRows(PROMPT[:-1], 0, [blocks]), SequenceRows(OTHER[:20], 0, [third])], [])
    rows = [
        SequenceRows(OTHER, 0, [others]),
        SequenceRows([PROMPT[-1], *DRAFT.token_ids], len(PROMPT) - 1, [blocks], DRAFT.masks()),
        SequenceRows(OTHER[20:21], 20, [third]),
    ]
    first, last = len(OTHER), len(OTHER) + 1 + len(PARENTS)
    logits = runner.run(rows, [first - 1, *range(first, last), last]).logits
    assert_nodes_right(reference, logits[1:-1], range(-1, len(PARENTS)))
    torch.testing.assert_close(logits[0], last_logits(reference, OTHER), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[-1], last_logits(reference, OTHER[:21]), atol=1e-4, rtol=1e-4)


def test_a_tree_that_grows(runner: Runner, reference: PreTrainedModel) -> None:
    """Its first nodes in one forward, those that follow them in a second one."""
    blocks, root = [9, 3, 4, 1, 0], len(PROMPT) - 1
    masks = DRAFT.masks()
    assert masks is not None
    runner.run([SequenceRows(PROMPT, 0, [blocks])], [])
    for nodes in (range(4), range(4, len(PARENTS))):
        tokens = [DRAFT.token_ids[node] for node in nodes]
        rows = SequenceRows(tokens, root + 1 + nodes[0], [blocks], [masks[node + 1] for node in nodes], root)
        logits = runner.run([rows], list(range(len(nodes)))).logits
        assert_nodes_right(reference, logits, nodes)


def test_keys_before_the_first_are_not_looked_at(runner: Runner) -> None:
    """What lies there makes no difference, whether a chain or a tree looks on."""
    results = []
    for before in (PROMPT[:3], OTHER[:3]):
        rows = SequenceRows(PROMPT[3:], 3, [[0, 1, 2]], first_key=3)
        runner.run([SequenceRows(before, 0, [[0, 1, 2]])], [])
        chain = runner.run([rows], [0, 33]).logits
        drafted = SequenceRows(DRAFT.token_ids, 37, [[0, 1, 2]], DRAFT.masks()[1:], 36, first_key=3)
        results.append(torch.cat([chain, runner.run([drafted], list(range(11))).logits]))
    assert torch.equal(*results)
