"""All methods of drafting, and requests whose tokens tests compare with those without drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from tests.speculation import scripted
from tests.speculation.dflash_files import dflash
from tests.speculation.mtp_files import write_head
from tests.speculation.scripted import Answers, ScriptedDrafter
from tests.speculation.small_engine import VOCAB_SIZE, ask, drafting, native_config, prompt_of
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
"""Limits the tiny model to few tokens, so that it repeats itself, as some methods need."""

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
    dflash: Path
    mtp: Path
    answers: Answers
    num_tokens: int

    def deploy(self, **options: Any) -> Engine:
        """Make an engine with these options of the `SpeculativeConfig`."""
        return drafting(self.config, num_speculative_tokens=self.num_tokens, **options)

    def tree(self, **options: Any) -> Engine:
        return self.deploy(tree=True, tree_nodes=3 * self.num_tokens, **options)

    def with_room(self, method: str, blocks: int, **options: Any) -> Given:
        """Return the same with a pool of so many blocks, which hold the method's own KV, too."""
        blocks = round(SEGMENTS.get(method.split()[0], 1.0) * blocks)
        return replace(self, config=native_config(Path(self.config.model), blocks, **options))

    def script(self, script: scripted.Script, num_tokens: int) -> Engine:
        return scripted.engine_with(self.config, ScriptedDrafter(script), num_tokens)


METHODS: dict[str, Callable[[Given], Engine]] = {
    "draft_model": lambda given: given.deploy(method="draft_model", model=str(given.draft)),
    "draft_model tree": lambda given: given.tree(method="draft_model", model=str(given.draft)),
    "eagle": lambda given: given.deploy(method="eagle", model=str(given.head)),
    "eagle tree": lambda given: given.tree(method="eagle", model=str(given.head)),
    "medusa": lambda given: given.deploy(method="medusa", model=str(given.medusa)),
    "medusa tree": lambda given: given.tree(method="medusa", model=str(given.medusa)),
    "mtp": lambda given: given.deploy(method="mtp", model=str(given.mtp)),
    "mtp tree": lambda given: given.tree(method="mtp", model=str(given.mtp)),
    "dflash": lambda given: given.deploy(method="dflash", model=str(given.dflash)),
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


def write_heads(
    folder: Path, config: ServeConfig, draft: Path, types: str, captured: tuple[int, ...]
) -> Given:
    """Write untrained heads. EAGLE and DFlash draft nothing but the few allowed tokens, so that some are
    right. DFlash has layers of `types`, and the context of `captured` layers.
    """
    target = Path(config.model)
    model, ids = load(target), torch.tensor(ALLOWED)
    size = model.config.vocab_size
    few = torch.zeros(size).index_fill(0, ids, 1)
    torch.manual_seed(0)
    eagle = build_eagle3(Target("tiny", model, few), HeadOptions(draft_vocab_size=len(ALLOWED)))
    eagle.save(folder / "eagle")
    build_medusa(Target("tiny", model, torch.ones(size)), HeadOptions(depth=5)).save(folder / "medusa")
    block = dflash(types, width=model.config.hidden_size, captured=captured, ids=ids)
    block.write(folder / "dflash")
    mtp = write_head(target, folder / "mtp")
    eagle_head, medusa, block_head = (folder / name for name in ("eagle", "medusa", "dflash"))
    return Given(config, draft, eagle_head, medusa, block_head, mtp, answers={}, num_tokens=5)


SEGMENTS = {"draft_model": 2.0, "eagle": 1.25, "mtp": 1.5, "dflash": 2.0}
"""The size of a block by method, in multiples of the target's own KV."""
