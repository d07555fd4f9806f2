"""What the tests of models with sliding windows do to an engine, and look at in it."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from engine.engine import Engine
from protocol.outputs import TokenOutput
from tests.engine.test_engine import ask, assert_empty, prompt_of, run, tokens
from tests.worker.tiny_model import assert_greedy, greedy


def num_used(engine: Engine) -> int:
    return engine.blocks.num_blocks - sum(engine.blocks.available)


def poisoned_run(engine: Engine) -> tuple[dict[str, list[TokenOutput]], int]:
    """What is free holds NaN in each step. Also the most blocks that were used."""
    outputs: dict[str, list[TokenOutput]] = {}
    most = 0
    while engine.has_work():
        engine.pool.segment("target")[engine.blocks.block_pools[0]._free] = torch.nan
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
        most = max(most, num_used(engine))
    return outputs, most


def cached(output: list[TokenOutput]) -> int | None:
    return output[0].cached_tokens


def ask_crowds(
    engine: Engine, reference: PreTrainedModel, seed: int, turns: int, least: int, max_tokens: int
) -> None:
    """`least` to six requests at once, whose prompts begin alike: they evict and preempt each other, and get
    the reference's tokens.
    """
    rng = random.Random(seed)
    texts = [prompt_of(220, seed) for seed in range(3)]
    for turn in range(turns):
        prompts = {
            f"{turn}-{index}": rng.choice(texts)[: rng.choice([10, 30, rng.randint(100, 220)])]
            + prompt_of(rng.randint(1, 20), turn)
            for index in range(rng.randint(least, 6))
        }
        for name, prompt in prompts.items():
            engine.add(ask(name, prompt, max_tokens))
        outputs = run(engine)
        for name, prompt in prompts.items():
            assert_greedy(reference, prompt, tokens(outputs[name]), max_tokens)
        assert_empty(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0 and stats.prefix_hit_tokens > 0
    assert engine.tiers is None or engine.tiers.counters.hit_blocks > 0


def blocks_from_disk(make: Callable[[], Engine], reference: PreTrainedModel) -> float:
    """How many an engine reads of a prompt that others have driven out of the pool and the host's memory of
    one before it. All but the last few tokens are found.
    """
    prompt, before = prompt_of(250), make()
    for index in range(4):
        before.add(ask("r", prompt if index == 0 else prompt_of(200, index)))
        run(before)
    before.close()
    after = make()
    after.add(ask("r", prompt))
    outputs = run(after)["r"]
    assert cached(outputs) == 240 and tokens(outputs) == greedy(reference, prompt, 8)
    assert after.tiers is not None
    counters = after.tiers.totals()
    after.close()
    assert counters["kv_host_hit_blocks_total"] == counters["kv_disk_hit_blocks_total"]
    return counters["kv_disk_hit_blocks_total"]
