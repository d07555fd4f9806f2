"""Random traffic in a small pool of each kind of store: no token changes, and nothing leaks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from protocol.outputs import TokenOutput
from tests.e2e.architectures import write_model
from tests.engine.kv.test_tiers_engine import assert_empty
from tests.engine.test_engine import ask, prompt_of, run, tiny_engine, tokens
from tests.worker.tiny_model import assert_greedy, load

KINDS = {
    "full": ("llama", 24),
    "window": ("mistral", 19),
    "windows": ("gemma3_text", 60),
    "states": ("qwen3_5_text", 22),
}
"""Model types, and blocks of a pool that holds little more than one of the longest sequences and a state."""
HOST_BLOCKS = {"none": 0, "host": 100, "disk": 30}
BOUNDS: dict[str, Any] = {"max_model_len": 300, "max_num_seqs": 6, "itl_budget": 0.0}


def engine_of(folder: Path, num_blocks: int, tiers: str, disk: Path) -> Engine:
    pool = tiny_engine(folder, kv_cache_memory_bytes=2**22, **BOUNDS).pool
    slots = 0 if pool.state_slots is None else 6 * pool.state_slots.layout.state_slot_bytes
    options = BOUNDS | {
        "kv_cache_memory_bytes": (num_blocks + pool.state_blocks) * pool.block_bytes + slots,
        "kv_offloading_size": HOST_BLOCKS[tiers] * pool.block_bytes / 2**30,
    }
    if tiers == "disk":
        options |= {"kv_disk_path": str(disk), "kv_disk_size": 600 * pool.block_bytes / 2**30}
    return tiny_engine(folder, **options)


@pytest.mark.parametrize(
    ("kind", "tiers"),
    [("full", "disk"), ("window", "none"), ("window", "disk"), ("windows", "host"), ("states", "host")],
)
def test_the_tokens_are_those_of_one_request_alone(kind: str, tiers: str, tmp_path: Path) -> None:
    """Prompts that begin alike evict and preempt each other. Some requests are aborted."""
    model_type, num_blocks = KINDS[kind]
    write_model(model_type, tmp_path / "model")
    engine = engine_of(tmp_path / "model", num_blocks, tiers, tmp_path / "disk")
    rng = random.Random(1)
    stems = [prompt_of(rng.randrange(100, 200), 200 + number) for number in range(4)]
    prompts: dict[str, list[int]] = {}
    outputs: dict[str, list[TokenOutput]] = {}
    for number in range(30):
        stem, name = rng.choice(stems), str(number)
        prompts[name] = stem[: rng.randrange(20, len(stem))] + prompt_of(rng.randrange(0, 40), number)
        engine.add(ask(name, prompts[name], max_tokens=60, priority=rng.randrange(2)))
        if rng.random() < 0.1:
            engine.abort(name)
            del prompts[name]
        for _ in range(rng.randrange(12)):
            for output in engine.step().outputs:
                outputs.setdefault(output.request_id, []).append(output)
    for name, rest in run(engine).items():
        outputs.setdefault(name, []).extend(rest)
    reference = load(tmp_path / "model")
    for name, prompt in prompts.items():
        assert_greedy(reference, prompt, tokens(outputs[name]), 60)
    stats, counters = engine.stats(), engine.counters()
    assert stats.prefix_hit_tokens > 0
    if (kind, tiers) != ("window", "disk"):  # there it depends on how fast the disk is
        assert stats.num_preemptions > 0
    assert tiers == "none" or counters["kv_host_hit_blocks_total"] > 0
    if tiers == "disk":
        assert counters["kv_disk_hit_blocks_total"] > 0
        assert counters["kv_disk_corrupt_blocks_total"] == counters["kv_disk_io_errors_total"] == 0
    assert_empty(engine)
    engine.close()
