"""The index compared with a plain record of the holders."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from protocol.kv_events import Window
from router.workers import kv_index
from router.workers.kv_index import KvIndex, block_keys

SHARED, CHAIN = 20, 60
SHARES = {f"worker {number}": 1 - number / 60 for number in range(30)}
"""The share of a prompt's blocks that each worker has."""


def chain(seed: int, length: int = CHAIN) -> list[int]:
    """Return keys of a prompt's blocks. All prompts share the first ones."""
    shared = random.Random(0).randbytes(16 * SHARED)
    return block_keys(shared + random.Random(seed).randbytes(16 * (length - SHARED)))


@pytest.mark.parametrize("num_holders", [3, 40])
def test_random_holdings(num_holders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holder has a leading part of some prompts, and loses the end first."""
    monkeypatch.setattr(kv_index, "MAX_SHARED_SETS", 50)
    rng = random.Random(num_holders)
    index: KvIndex[str] = KvIndex()
    prompts = [chain(seed) for seed in range(1, 6)]
    held: dict[str, dict[int, int]] = {}
    slots: dict[str, int] = {}
    most_slots = 0
    for step in range(3000):
        name = f"worker {rng.randrange(num_holders)}"
        if name not in slots:
            slots[name], held[name] = index.add_holder(name), defaultdict(int)
        prompt, length = rng.randrange(len(prompts)), rng.randrange(CHAIN)
        keys, now = prompts[prompt], held[name][prompt]
        match rng.randrange(20):
            case 0:
                index.remove_holder(slots.pop(name))
                del held[name]
            case 1 | 2 | 3 | 4 if length >= SHARED:
                index.evict(slots[name], keys[length:])
                held[name][prompt] = min(now, length)
            case 5:
                index.sweep(rng.choice([0.0005, 1.0]))
            case _:
                index.store(slots[name], keys[:length])
                for other in range(len(prompts)):
                    shared = length if other == prompt else min(length, SHARED)
                    held[name][other] = max(held[name][other], shared)
        most_slots = max(most_slots, max(slots.values(), default=0))
        if step % 10 == 0:
            expected = {name: lengths[prompt] for name, lengths in held.items() if lengths[prompt]}
            assert index.find(keys) == expected
    assert most_slots < num_holders + 50, "slots are used again"


def test_removed_holders_leave_nothing() -> None:
    index: KvIndex[str] = KvIndex()
    slots = [index.add_holder(f"worker {number}") for number in range(40)]
    for slot in slots:
        index.store(slot, chain(slot + 1))
    for slot in slots[1:]:
        index.remove_holder(slot)
    assert index.find(chain(5)) == {"worker 0": SHARED}
    while index.sweep(0.001):
        pass
    assert len(index) == CHAIN
    assert index.find(chain(1)) == {"worker 0": CHAIN}
    assert index.add_holder("new") in slots[1:]
    assert index.find(chain(5)) == {"worker 0": SHARED}


def test_a_gap_ends_a_prefix() -> None:
    index: KvIndex[str] = KvIndex()
    for name, length in {"a": CHAIN, "b": CHAIN, "c": CHAIN, "d": CHAIN // 3}.items():
        index.store(index.add_holder(name), chain(1)[:length])
    index.evict(1, chain(1)[CHAIN // 2 :][:1])
    index.evict(2, chain(1)[CHAIN // 4 :][:1])
    assert index.find(chain(1)) == {"a": CHAIN, "b": CHAIN // 2, "c": CHAIN // 4, "d": CHAIN // 3}


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_with_a_window_a_prefix_needs_only_its_last_blocks(block_size: int) -> None:
    rng, window = random.Random(block_size), Window(100, block_size)
    index: KvIndex[str] = KvIndex()
    keys = chain(1)
    held = {name: {place for place in range(CHAIN) if rng.random() < share} for name, share in SHARES.items()}
    for name, places in held.items():
        index.store(index.add_holder(name), [keys[place] for place in places])

    def longest(places: set[int], limit: int) -> int:
        ends = range(limit, 0, -1)
        return next(
            (end for end in ends if places >= set(range(window.first_place(end * block_size), end))), 0
        )

    for limit in (0, 1, 5, CHAIN // 2, CHAIN):
        expected = {name: end for name, places in held.items() if (end := longest(places, limit))}
        assert index.find_windows(keys[:limit], window) == expected
    assert len({longest(places, CHAIN) for places in held.values()}) > 3
