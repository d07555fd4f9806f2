"""Random use of blocks within a sliding window: what rows read is always what was written for them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.arena import OutOfBlocksError
from engine.block_manager import BlockManager
from engine.holdings import Holdings
from engine.prefix_cache import find_prefix, hold_blocks, missing_blocks, reserve_blocks
from engine.prefix_room import find_room
from protocol.ids import block_identities
from protocol.window import Window
from tests.engine.fake_pool import FakePool
from tests.engine.listener import Listener, really_held
from tests.engine.test_holdings import FakeTier

ROOT = b"r" * 16
SIZE, BLOCK, ROWS = 40, 16, 48
WINDOW = Window(SIZE, BLOCK)


class Written:
    """What the places of a pool hold: the tokens up to there."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = FakePool(BLOCK, num_blocks)
        self.blocks = BlockManager(self.pool, window=WINDOW, most_rows=ROWS)
        self.content: dict[tuple[int, int], int] = {}
        self.log, self.listener = self.blocks.watch(), Listener()

    def write(self, held: Holdings, tokens: Sequence[int], first: int, end: int) -> None:
        arena = self.blocks.arenas[0]
        for _, source, target in self.pool.copies:
            for offset in range(BLOCK):
                self.content[target, offset] = self.content.get((source, offset), 0)
        self.pool.copies.clear()
        for position in range(first, end):
            block = held.blocks[0][position // BLOCK]
            assert arena.num_references(block) == 1 and not arena.is_locked(block)
            self.content[block, position % BLOCK] = hash(tuple(tokens[: position + 1]))

    def check_reads(self, held: Holdings, tokens: Sequence[int], first: int, end: int) -> None:
        """Of rows from `first` on: all that the tiles of the first one's window have."""
        for position in range(WINDOW.first_place(first) * BLOCK, end):
            place = held.blocks[0][position // BLOCK], position % BLOCK
            assert self.content[place] == hash(tuple(tokens[: position + 1]))

    def check_counts(self, live: Sequence[Holdings]) -> None:
        used = {block for held in live for block in held.blocks[0][held.num_left :]}
        assert sum(self.blocks.available) == self.blocks.num_blocks - len(used)
        self.listener.hear(self.log.take())
        assert self.listener.held == really_held(self.blocks)


@pytest.mark.parametrize("num_blocks", [14, 40])
def test_rows_read_what_was_written(num_blocks: int) -> None:
    rng = random.Random(num_blocks)
    pool = Written(num_blocks)
    texts = [[rng.randrange(9) for _ in range(420)] for _ in range(2)]
    live: list[tuple[Holdings, list[int], int, int]] = []
    hits = 0
    for _ in range(1500):
        if rng.random() < 0.3 and len(live) < 6:
            tokens = rng.choice(texts)[: rng.randint(1, 300)] + rng.choices(range(9), k=rng.randint(0, 20))
            begun = begin(pool, tokens, rng.random() < 0.3)
            if begun is not None:
                live.append(begun)
                hits += begun[2]
        elif live:
            index = rng.randrange(len(live))
            held, tokens, computed, prompt = live[index]
            done = rng.random() < 0.05 or len(tokens) > 400
            stepped = None if done else step(pool, held, tokens, computed, prompt, rng)
            if stepped is None:
                held.free()
                del live[index]
            else:
                live[index] = (held, *stepped, prompt)
        pool.check_counts([held for held, *_ in live])
    assert hits > 1000


def begin(pool: Written, tokens: list[int], is_reserved: bool) -> tuple[Holdings, list[int], int, int] | None:
    """As the scheduler does, or for a prompt that another worker computes."""
    if is_reserved:
        reserved = reserve_blocks(pool.blocks, tokens, ROOT)
        if reserved is None:
            return None
        held, covered = reserved
        pool.write(held, tokens, covered, len(tokens))
        held.publish(tokens, len(tokens))
        return held, tokens, len(tokens), len(tokens)
    held, covered = find_prefix(pool.blocks, tokens, ROOT)
    room = held.room_to_begin(covered, len(tokens))
    if not held.fits(covered, room):
        held.free()
        return None
    held.grow(covered, room)
    return held, tokens, covered, len(tokens)


def step(
    pool: Written, held: Holdings, tokens: list[int], computed: int, prompt: int, rng: random.Random
) -> tuple[list[int], int] | None:
    """A chunk, or a token with drafts of which some are kept; None where there is no room."""
    in_prompt = computed < len(tokens)
    if in_prompt:
        end, kept = min(len(tokens), computed + rng.randint(1, ROWS)), 0
        new = tokens
    else:
        drafted = rng.randint(1, 12)
        new = tokens + rng.choices(range(9), k=drafted)
        end, kept = len(new), rng.randint(1, drafted)
    try:
        held.grow(computed, end)
    except OutOfBlocksError:
        is_alone_with_its_blocks = all(
            pool.blocks.arenas[0].num_references(block) == 1 for block in held.blocks[0][held.num_left :]
        )
        assert not in_prompt or not is_alone_with_its_blocks
        return None
    pool.write(held, new, computed, end)
    pool.check_reads(held, new, computed, end)
    committed = computed + kept if kept else end
    held.commit(committed, [], new)
    if len(held.blocks[0]) * BLOCK <= prompt:
        most = (WINDOW.span() + WINDOW.span(ROWS)) // BLOCK  # what it found, and its own
        assert len(held.blocks[0]) - held.num_left <= most
    return (new[:committed] if kept else tokens), committed


def published(blocks: BlockManager, tokens: Sequence[int]) -> None:
    held, covered = find_prefix(blocks, tokens, ROOT)
    held.grow(covered, len(tokens))
    held.publish(tokens, len(tokens))
    held.free()


TOKENS = list(range(300))
IDENTITIES = list(block_identities(ROOT, TOKENS, BLOCK))


def test_another_worker_sends_the_blocks_of_the_window() -> None:
    asking, holding = (BlockManager(FakePool(BLOCK, 20), window=WINDOW) for _ in range(2))
    published(holding, TOKENS[:200])
    room = find_room(asking, TOKENS, ROOT)
    assert room is not None and room.covered == 0 and room.wanted == IDENTITIES[:18]
    assert len(room.holdings.blocks[0]) == WINDOW.span() // BLOCK < 18
    lent = hold_blocks(holding, room.wanted)
    assert (lent.num_left, len(lent.identities)) == (8, 12)
    room.keep(4, num_skipped=8)
    assert sum(asking.available) == asking.num_free + 4 == 20
    held, covered = find_prefix(asking, TOKENS, ROOT)
    assert covered == 192 and held.num_left == 8
    held.free()
    again = find_room(asking, TOKENS[:193], ROOT)
    assert again is not None and not again.wanted
    assert find_room(BlockManager(FakePool(BLOCK, 3), window=WINDOW), TOKENS, ROOT) is None


def test_the_disk_is_asked_for_the_window() -> None:
    class Disk(FakeTier):
        def knows(self, identity: bytes) -> bool:
            return identity in self.identities

    disk = Disk([*IDENTITIES[:3], *IDENTITIES[9:13]])
    blocks = BlockManager(FakePool(BLOCK, 20), tiers=[disk], window=WINDOW)
    published(blocks, TOKENS[:150])
    assert list(missing_blocks(blocks, TOKENS, ROOT)) == IDENTITIES[9:13]
    disk.identities.remove(IDENTITIES[11])
    assert list(missing_blocks(blocks, TOKENS, ROOT)) == IDENTITIES[9:11]


@pytest.mark.parametrize(("num_tokens", "first"), [(230, 8), (270, 12)])
@pytest.mark.parametrize("lost", [0, 2, 4])
def test_what_gets_lost_below_is_not_gone_on_from(lost: int, num_tokens: int, first: int) -> None:
    """The window of an earlier position begins earlier. A reservation is filled by another worker."""
    tier = FakeTier(IDENTITIES[8:12], lost)
    blocks = BlockManager(FakePool(BLOCK, 20), tiers=[tier], window=WINDOW)
    held, covered = find_prefix(blocks, TOKENS[:200], ROOT)
    assert (covered, held.num_left, held.below) == (128, 8, IDENTITIES[8:12])
    held.grow(covered, 200)
    covered = held.fill(covered, 199)
    assert covered == (12 - lost) * BLOCK
    assert held.reads_back_from(covered) == (lost == 0)
    held.free()
    tier.lost = lost
    reserved = reserve_blocks(blocks, TOKENS[:num_tokens], ROOT)
    assert reserved is not None
    held, covered = reserved
    assert (held.num_left, covered) == (first, max(12 - lost, first) * BLOCK)
    assert held.identities == IDENTITIES[: covered // BLOCK]
    held.publish(TOKENS, num_tokens)
    assert held.identities == IDENTITIES[: num_tokens // BLOCK]
    held.free()
    assert sum(blocks.available) == 20
