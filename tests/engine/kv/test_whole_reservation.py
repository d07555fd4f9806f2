"""Without paging a sequence holds blocks for the longest one, from its first step to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.kv.block_manager import BlockManager
from engine.kv.block_pool import OutOfBlocksError
from engine.kv.prefix_cache import find_prefix, reserve_blocks
from protocol.ids import root_identity
from tests.engine.fake_pool import FakePool
from tests.engine.test_engine import (
    BLOCK_BYTES,
    MAX_LEN,
    ask,
    assert_empty,
    prompt_of,
    run,
    tiny_engine,
    tokens,
)

SIZE = 4
LEAST = 5
ROOT = root_identity("model", "fp32")


def manager_of(*num_blocks: int) -> BlockManager:
    manager = BlockManager(FakePool(SIZE, *num_blocks))
    manager.least_blocks = LEAST
    return manager


def test_the_first_token_takes_all_that_the_longest_sequence_needs() -> None:
    manager = manager_of(8, 6)
    held, covered = find_prefix(manager, [1, 2, 3], ROOT)
    assert held.needs(covered, 3) == [LEAST, LEAST] and not held.fits(covered, 3, spare=2)
    held.grow(covered, 3)
    assert manager.available == (8 - LEAST, 6 - LEAST)
    assert [len(blocks) for blocks in held.blocks] == [1, 1], "its table is as long as its tokens"
    for length in range(4, LEAST * SIZE + 1):
        held.grow(length - 1, length)
        assert manager.available == (8 - LEAST, 6 - LEAST)
        assert len(held.blocks[0]) == -(-length // SIZE) and len(set(held.blocks[0])) == len(held.blocks[0])
    held.grow(LEAST * SIZE, LEAST * SIZE + 1)
    assert manager.available == (8 - LEAST - 1, 6 - LEAST - 1)
    held.free()
    assert manager.available == (8, 6)


def test_a_shared_prefix_is_part_of_what_is_reserved() -> None:
    manager = manager_of(12)
    prompt = list(range(2 * SIZE))
    first, covered = find_prefix(manager, prompt, ROOT)
    first.grow(covered, len(prompt))
    first.publish(prompt, len(prompt))
    reserved = reserve_blocks(manager, prompt, ROOT)
    assert reserved is not None
    second, covered = reserved
    assert covered == len(prompt) and second.blocks == first.blocks
    assert manager.available == (12 - LEAST - (LEAST - 2),)
    second.free(), first.free()
    assert manager.available == (12,) and manager.num_cached == 2


def test_too_few_blocks_for_the_longest_sequence_change_nothing() -> None:
    manager = manager_of(LEAST - 1)
    held, covered = find_prefix(manager, [1], ROOT)
    with pytest.raises(OutOfBlocksError, match="5 KV blocks are needed, 4 are available"):
        held.grow(covered, 1)
    assert manager.available == (LEAST - 1,) and held.blocks == [[]]
    assert reserve_blocks(manager, [1], ROOT) is None


def test_requests_wait_for_room_that_pages_would_leave(folder: Path) -> None:
    prompts = {name: prompt_of(20, seed) for seed, name in enumerate("abcd")}
    answers, most = {}, {}
    for paged in (True, False):
        room = 2 * (MAX_LEN // 16 + 4) * BLOCK_BYTES
        options = {"max_model_len": MAX_LEN, "max_num_seqs": 8, "kv_cache_memory_bytes": room}
        engine = tiny_engine(folder, paged_kv=paged, **options)
        for name, prompt in prompts.items():
            engine.add(ask(name, prompt, max_tokens=20))
        engine.step()
        most[paged] = engine.stats().num_running
        assert engine.stats().free_blocks <= (34 if paged else 8)
        answers[paged] = {name: tokens(outputs) for name, outputs in run(engine).items()}
        assert_empty(engine)
    assert most == {True: 4, False: 2}
    assert all(answers[True][name][-19:] == answers[False][name][-19:] for name in prompts)
