"""Random use of blocks within sliding windows: what rows read is always what was written for them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.kv.block_manager import BlockManager
from engine.kv.block_pool import OutOfBlocksError
from engine.kv.prefix_cache import find_prefix, hold_blocks, missing_blocks, reserve_blocks
from engine.kv.prefix_room import find_room
from engine.kv.sequence_blocks import SequenceBlocks
from protocol.ids import block_identities, table_identity
from protocol.kv_events import Medium
from protocol.window import Window
from tests.engine.fake_pool import FakePool
from tests.engine.kv.test_sequence_blocks import FakeTier
from tests.engine.listener import Listener, really_held

ROOT = b"r" * 16
SIZE, BLOCK, ROWS = 40, 16, 48
WINDOW = Window(SIZE, BLOCK)
ALONE, MIXED = [WINDOW], [None, WINDOW, Window(4, BLOCK)]
"""What the tables see."""


class Written:
    """What the places of a pool hold: the tokens up to there."""

    def __init__(self, num_blocks: int, windows: list[Window | None]) -> None:
        self.pool = FakePool(BLOCK, num_blocks)
        self.blocks = BlockManager(self.pool, windows=windows, most_rows=ROWS)
        self.content: dict[tuple[int, int], int] = {}
        self.log, self.listener = self.blocks.watch(), Listener()

    def write(self, held: SequenceBlocks, tokens: Sequence[int], first: int, end: int) -> None:
        block_pool = self.blocks.block_pools[0]
        for _, source, target in self.pool.copies:
            for offset in range(BLOCK):
                self.content[target, offset] = self.content.get((source, offset), 0)
        self.pool.copies.clear()
        for table, (blocks, num_left) in enumerate(zip(held.blocks, held.num_left, strict=True)):
            for position in range(max(first, num_left * BLOCK), end):
                block = blocks[position // BLOCK]
                assert block_pool.num_references(block) == 1 and not block_pool.is_locked(block)
                self.content[block, position % BLOCK] = hash((table, *tokens[: position + 1]))

    def check_reads(self, held: SequenceBlocks, tokens: Sequence[int], first: int, end: int) -> None:
        """Of rows from `first` on: all that the tiles of the first one's window have."""
        for table, blocks in zip(self.blocks.tables, held.blocks, strict=True):
            for position in range(table.first_place(first) * BLOCK, end):
                place = blocks[position // BLOCK], position % BLOCK
                assert self.content[place] == hash((table.number, *tokens[: position + 1]))

    def check_counts(self, live: Sequence[SequenceBlocks]) -> None:
        used = {block for held in live for block in own_blocks(held)}
        assert sum(self.blocks.available) == self.blocks.num_blocks - len(used)
        self.listener.hear(self.log.take())
        assert self.listener.held == really_held(self.blocks)


def own_blocks(held: SequenceBlocks) -> list[int]:
    """Those of all tables, without the places that have none."""
    tables = zip(held.blocks, held.num_left, strict=True)
    return [block for blocks, num_left in tables for block in blocks[num_left:]]


@pytest.mark.parametrize(
    ("num_blocks", "windows", "least"), [(14, ALONE, 1000), (40, ALONE, 1000), (50, MIXED, 1000)]
)
def test_rows_read_what_was_written(num_blocks: int, windows: list[Window | None], least: int) -> None:
    rng = random.Random(num_blocks)
    pool = Written(num_blocks, windows)
    texts = [[rng.randrange(9) for _ in range(420)] for _ in range(2)]
    live: list[tuple[SequenceBlocks, list[int], int, int]] = []
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
    assert hits > least


def begin(
    pool: Written, tokens: list[int], is_reserved: bool
) -> tuple[SequenceBlocks, list[int], int, int] | None:
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
    if not held.fits(covered, len(tokens), ROWS):
        held.free()
        return None
    held.grow(covered, len(tokens), ROWS)
    return held, tokens, covered, len(tokens)


def step(
    pool: Written, held: SequenceBlocks, tokens: list[int], computed: int, prompt: int, rng: random.Random
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
            pool.blocks.block_pools[0].num_references(block) == 1 for block in own_blocks(held)
        )
        assert not in_prompt or not is_alone_with_its_blocks
        return None
    pool.write(held, new, computed, end)
    pool.check_reads(held, new, computed, end)
    committed = computed + kept if kept else end
    held.commit(committed, [], new)
    for table, blocks, num_left in zip(pool.blocks.tables, held.blocks, held.num_left, strict=True):
        if table.window is not None and len(blocks) * BLOCK <= prompt:
            most = (table.window.span() + table.window.span(ROWS)) // BLOCK  # what it found, and its own
            assert len(blocks) - num_left <= most
    return (new[:committed] if kept else tokens), committed


def published(blocks: BlockManager, tokens: Sequence[int]) -> None:
    held, covered = find_prefix(blocks, tokens, ROOT)
    held.grow(covered, len(tokens))
    held.publish(tokens, len(tokens))
    held.free()


TOKENS = list(range(300))
IDENTITIES = list(block_identities(ROOT, TOKENS, BLOCK))


def test_another_worker_sends_the_blocks_of_the_window() -> None:
    asking, holding = (BlockManager(FakePool(BLOCK, 20), windows=ALONE) for _ in range(2))
    published(holding, TOKENS[:200])
    room = find_room(asking, TOKENS, ROOT)
    assert room is not None and room.covered == 0 and room.wanted == IDENTITIES[:18]
    assert len(room.sequence_blocks.blocks[0]) == WINDOW.span() // BLOCK < 18
    lent = hold_blocks(holding, room.wanted)
    assert (lent.num_left, len(lent.identities)) == ([8], 12)
    assert room.num_sent(12) == 4
    room.keep(12)
    assert sum(asking.available) == asking.num_free + 4 == 20
    held, covered = find_prefix(asking, TOKENS, ROOT)
    assert covered == 192 and held.num_left == [8]
    held.free()
    again = find_room(asking, TOKENS[:193], ROOT)
    assert again is not None and not again.wanted
    assert find_room(BlockManager(FakePool(BLOCK, 3), windows=ALONE), TOKENS, ROOT) is None


def test_of_mixed_tables_another_worker_sends_what_is_missing() -> None:
    """Behind what is here, of all layers what these read."""
    asking, holding = (BlockManager(FakePool(BLOCK, 60), windows=MIXED) for _ in range(2))
    published(asking, TOKENS[:70])
    published(holding, TOKENS[:200])
    room = find_room(asking, TOKENS, ROOT)
    assert room is not None and room.covered == 64 and room.wanted == IDENTITIES[4:18]
    lent = hold_blocks(holding, room.wanted, 4)
    assert (lent.num_left, len(lent.identities)) == ([0, 4, 4], 8)
    firsts = [table.first_place(192) for table in asking.tables]
    assert firsts == [0, 8, 8]
    assert room.num_sent(8) == 8 + 4 + 4 == sum(len(each.blocks) for each in lent.extents(lent.num_left))
    room.keep(8)
    assert sum(asking.available) == 60
    held, covered = find_prefix(asking, TOKENS, ROOT)
    assert covered == 192 and held.num_left == firsts


def test_the_disk_is_asked_for_the_window() -> None:
    class Disk(FakeTier):
        def knows(self, identity: bytes) -> bool:
            return identity in self.identities

    disk = Disk([*IDENTITIES[:3], *IDENTITIES[9:13]])
    blocks = BlockManager(FakePool(BLOCK, 20), tiers=[disk], windows=ALONE)
    published(blocks, TOKENS[:150])
    assert list(missing_blocks(blocks, TOKENS, ROOT)) == IDENTITIES[9:13]
    disk.identities.remove(IDENTITIES[11])
    assert list(missing_blocks(blocks, TOKENS, ROOT)) == IDENTITIES[9:11]


@pytest.mark.parametrize(("num_tokens", "first"), [(230, 8), (270, 12)])
@pytest.mark.parametrize("lost", [0, 2, 4])
def test_what_gets_lost_below_is_not_gone_on_from(lost: int, num_tokens: int, first: int) -> None:
    """The window of an earlier position begins earlier. A reservation is filled by another worker."""
    tier = FakeTier(IDENTITIES[8:12], lost)
    blocks = BlockManager(FakePool(BLOCK, 20), tiers=[tier], windows=ALONE)
    held, covered = find_prefix(blocks, TOKENS[:200], ROOT)
    assert (covered, held.num_left, held.below) == (128, [8], IDENTITIES[8:12])
    held.grow(covered, 200)
    covered = held.fill(covered, 199)
    assert covered == (12 - lost) * BLOCK
    assert held.goes_on_from(covered) == (lost == 0)
    held.free()
    tier.lost = lost
    reserved = reserve_blocks(blocks, TOKENS[:num_tokens], ROOT)
    assert reserved is not None
    held, covered = reserved
    assert (held.num_left, covered) == ([first], max(12 - lost, first) * BLOCK)
    assert held.identities == IDENTITIES[: covered // BLOCK]
    held.publish(TOKENS, num_tokens)
    assert held.identities == IDENTITIES[: num_tokens // BLOCK]
    held.free()
    assert sum(blocks.available) == 20


def test_room_that_falls_behind_the_window_comes_again_at_the_end() -> None:
    """So nobody takes it meanwhile, until all of the sequence has its place."""
    blocks = BlockManager(FakePool(BLOCK, 40), windows=[None, WINDOW])
    held, _ = find_prefix(blocks, TOKENS, ROOT)
    held.grow(0, len(TOKENS), ROWS)
    room = WINDOW.span(ROWS) // BLOCK
    for position in (100, 200):
        held.leave(position)
        left = WINDOW.first_place(position)
        assert held.num_left == [0, left]
        assert list(map(len, held.blocks)) == [19, min(room + left, 19)]
        assert sum(blocks.available) == 40 - 19 - min(room, 19 - left)


@pytest.mark.parametrize(("lost", "covered", "goes_on"), [(0, 191, True), (1, 176, True), (2, 160, False)])
def test_a_window_comes_from_below_behind_blocks_that_are_here(
    lost: int, covered: int, goes_on: bool
) -> None:
    """What is lost meanwhile would be written to blocks that others may have, so it is looked for again. The
    last block of a prompt that is found whole is copied.
    """
    tier = FakeTier([table_identity(each, 1) for each in IDENTITIES], lost)
    blocks, here = with_all_but_the_window(tier)
    pool = blocks.pool
    assert isinstance(pool, FakePool)
    held, found = find_prefix(blocks, TOKENS[:192], ROOT)
    assert (found, held.num_left, held.below) == (128, [0, 8], IDENTITIES[8:12])
    begin = min(held.end_found, 191)
    assert held.needs(begin, 192) == [5] and held.blocks[0] == here
    held.grow(begin, 192)
    assert [source for _, source, _ in pool.copies] == here[-1:]
    assert held.fill(found, 191) == covered
    assert tier.asked == tier.identities[8:12], "no block that is here is written"
    assert held.goes_on_from(covered) == goes_on
    held.free()
    blocks, _ = with_all_but_the_window(tier)
    assert (find_room(blocks, TOKENS[:193], ROOT) is None) == (lost > 0)


def with_all_but_the_window(tier: FakeTier) -> tuple[BlockManager, list[int]]:
    """The pool has the first twelve blocks of the layers that see all, which are returned."""
    blocks = BlockManager(FakePool(BLOCK, 60), tiers=[tier], windows=[None, Window(4, BLOCK)])
    here = blocks.block_pools[0].take(12)
    for identity, block in zip(IDENTITIES, here, strict=False):
        blocks.block_pools[0].publish(identity, block)
        blocks.block_pools[0].dereference(block)
    return blocks, here


def test_a_reservation_looks_again_for_what_got_lost() -> None:
    """Another worker writes to its blocks."""

    class Losing(FakeTier):
        def load(self, identities: list[bytes], block_ids: list[int]) -> int:
            self.identities = []
            return super().load(identities, block_ids)

    blocks, here = with_all_but_the_window(Losing([table_identity(each, 1) for each in IDENTITIES], 1))
    reserved = reserve_blocks(blocks, TOKENS[:192], ROOT)
    assert reserved is not None
    held, covered = reserved
    assert covered == 176 and held.blocks[0][:11] == here[:11] and held.blocks[0][11] not in here
    held.free()
    assert sum(blocks.available) == 60


def test_who_keeps_track_is_told_of_the_first_table_alone() -> None:
    class Telling(FakeTier):
        def contents(self) -> list[tuple[Medium, bytes]]:
            return [(Medium.CPU, identity) for identity in self.identities]

    tier = Telling([table_identity(IDENTITIES[0], 1)])
    blocks = BlockManager(FakePool(BLOCK, 8), tiers=[tier], windows=[None, Window(4, BLOCK)])
    log = blocks.watch()
    published(blocks, TOKENS[:32])
    assert [event.identity for event in log.take()] == [b"", *IDENTITIES[:2]]
    assert [event.identity for event in blocks.contents()] == [b"", *IDENTITIES[:2]]
    blocks.block_pools[0].lower = None
    blocks.block_pools[0].take(8)
    assert {event.identity for event in log.take()} == {*IDENTITIES[:2]}


def test_room_is_counted_for_all_tables() -> None:
    blocks = BlockManager(FakePool(BLOCK, 10), windows=MIXED)
    held, _ = find_prefix(blocks, TOKENS[:10], ROOT)
    assert held.needs(0, 30) == [6] and held.fits(0, 30, spare=1) and not held.fits(0, 30, spare=2)
    with pytest.raises(OutOfBlocksError, match="12 KV blocks are needed, 10 are available"):
        held.grow(0, 64)
    assert reserve_blocks(blocks, TOKENS[:64], ROOT) is None
    assert sum(blocks.available) == 10
