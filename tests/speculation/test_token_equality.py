"""With coupled verification, speculation changes no token, however a request is served.

fp32, one engine. To test another method, add a line to `METHODS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.speculation import SpeculativeConfig
from speculation.speculator import speculate
from tests.speculation import scripted
from tests.speculation.scripted import Answers, ScriptedDrafter
from tests.speculation.small_engine import VOCAB_SIZE, ask, prompt_of, run, small_config, tokens
from tests.worker.tiny_model import load
from training.heads.contract import HeadOptions, Target
from training.heads.eagle import build_eagle3
from training.heads.medusa import build_medusa

CHUNK = 128
LENGTHS = [1, 16, 20, 33, 40, CHUNK + 20]
"""Prompt lengths. The last prompt is computed in chunks, beside others that already draft."""

NUM_TOKENS = 36
ROOMY, CRAMPED = 128, 26
"""Blocks of a pool for all requests, and of one in which some are preempted."""

ALLOWED = [5, 6, 7]
FEW = {"allowed_token_ids": ALLOWED}
"""Limits the tiny model to few tokens: it hardly repeats itself otherwise, and some methods need
repetitions.
"""

SAMPLING: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}, {"temperature": 0.0, **FEW}],
    "seeded": [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "top_p": 0.9, "seed": 2},
        {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.4, "seed": 3},
        {"temperature": 0.5, "seed": 4, **FEW},
    ],
}


def requests(sampling: str, num_tokens: int = NUM_TOKENS) -> list[EngineRequest]:
    choices = SAMPLING[sampling]
    return [
        ask(f"r{i}", prompt_of(length, i), num_tokens, ignore_eos=True, **choices[i % len(choices)])
        for i, length in enumerate(LENGTHS)
    ]


@dataclass(frozen=True)
class Given:
    """Inputs of a method: an engine's config, a draft model, heads, the right tokens and their number."""

    config: ServeConfig
    draft: Path
    head: Path
    medusa: Path
    answers: Answers
    num_tokens: int

    def deploy(self, **options: Any) -> Engine:
        """Make an engine with these options of the `SpeculativeConfig`."""
        asked = SpeculativeConfig(num_speculative_tokens=self.num_tokens, **options)
        config = replace(self.config, speculative_config=asked)
        return Engine(config, speculate=speculate)

    def script(self, script: scripted.Script, num_tokens: int) -> Engine:
        return scripted.engine_with(self.config, ScriptedDrafter(script), num_tokens)


METHODS: dict[str, Callable[[Given], Engine]] = {
    "draft_model": lambda given: given.deploy(method="draft_model", model=str(given.draft)),
    "draft_model tree": lambda given: given.deploy(
        method="draft_model", model=str(given.draft), tree=True, tree_nodes=3 * given.num_tokens
    ),
    "eagle": lambda given: given.deploy(method="eagle", model=str(given.head)),
    "eagle tree": lambda given: given.deploy(
        method="eagle", model=str(given.head), tree=True, tree_nodes=3 * given.num_tokens
    ),
    "medusa": lambda given: given.deploy(method="medusa", model=str(given.medusa)),
    "medusa tree": lambda given: given.deploy(
        method="medusa", model=str(given.medusa), tree=True, tree_nodes=3 * given.num_tokens
    ),
    "self_speculative": lambda given: given.deploy(
        method="self_speculative", skip_layers=[1], quantization="int8"
    ),
    "ngram": lambda given: given.deploy(method="ngram"),
    "suffix": lambda given: given.deploy(method="suffix"),
    "lookahead": lambda given: given.deploy(method="lookahead"),
    "custom": lambda given: given.deploy(method="custom", drafter="examples.custom_drafter:LastFollower"),
    "scripted chain": lambda given: given.script(
        scripted.sometimes_right(given.answers, 0.7, VOCAB_SIZE), given.num_tokens
    ),
    "scripted tree": lambda given: given.script(
        scripted.tree(given.answers, 0.7, VOCAB_SIZE), 3 * given.num_tokens
    ),
}


SEGMENTS = {"draft_model": 2.0, "eagle": 1.25}
"""The size of a block by method, in multiples of the target's own KV."""


@pytest.fixture(scope="module")
def head(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an untrained head. It drafts only the few allowed tokens, so some are right."""
    folder = tmp_path_factory.mktemp("head")
    counts = torch.zeros(VOCAB_SIZE).index_fill(0, torch.tensor(ALLOWED), 1)
    torch.manual_seed(0)
    build_eagle3(Target("tiny", load(pair[0]), counts), HeadOptions(draft_vocab_size=len(ALLOWED))).save(
        folder
    )
    return folder


@pytest.fixture(scope="module")
def medusa(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("medusa")
    target = Target("tiny", load(pair[0]), torch.ones(VOCAB_SIZE))
    build_medusa(target, HeadOptions(depth=5)).save(folder)
    return folder


@pytest.fixture(scope="module")
def plain(pair: tuple[Path, Path]) -> dict[str, dict[str, list[int]]]:
    """Return the answers without speculation, alone and with room."""
    engine = Engine(small_config(pair[0], ROOMY))
    return {
        sampling: {r.request_id: run(engine, [r])[r.request_id].token_ids for r in requests(sampling)}
        for sampling in SAMPLING
    }


CASES = [
    *((method, 5, "seeded", True) for method in METHODS),
    *((method, 8, "greedy", False) for method in METHODS),
    *((method, 1, "seeded", False) for method in ("draft_model", "eagle", "medusa", "scripted tree")),
    *((method, 1, "greedy", False) for method in ("draft_model tree", "lookahead")),
]


@pytest.mark.parametrize(("method", "num_tokens", "sampling", "cramped"), CASES)
def test_tokens_equal_those_without_speculation(
    pair: tuple[Path, Path],
    head: Path,
    medusa: Path,
    plain: dict[str, dict[str, list[int]]],
    method: str,
    num_tokens: int,
    sampling: str,
    cramped: bool,
) -> None:
    """First with an empty cache, then again with the prompts' blocks in it."""
    target, draft = pair
    blocks = round(SEGMENTS.get(method.split()[0], 1.0) * (CRAMPED if cramped else ROOMY))
    config = small_config(target, blocks, max_num_batched_tokens=CHUNK)
    engine = METHODS[method](Given(config, draft, head, medusa, plain[sampling], num_tokens))
    for _ in range(2):
        hits, preemptions = engine.stats().prefix_hit_tokens, engine.stats().num_preemptions
        found = run(engine, requests(sampling))
        assert tokens(found) == plain[sampling]
        assert (engine.stats().num_preemptions > preemptions) == cramped
        assert sum(output.accepted_tokens for output in found.values()) > 0
    assert engine.stats().prefix_hit_tokens > hits
