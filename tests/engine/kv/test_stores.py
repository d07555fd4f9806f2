"""Sequences over all kinds of stores: rows read what was written for them, in the pool and in lower tiers."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from engine.kv.block_manager import BlockManager
from engine.kv.prefix_cache import admit, find_prefix, find_room, hold_blocks, missing_blocks, reserve_blocks
from engine.kv.sequence_blocks import SequenceBlocks
from engine.kv.tiers.host import HostTier
from protocol.handoff import Extent
from protocol.ids import block_identities, state_identities, table_identity
from protocol.kv_events import Window
from tests.engine.fake_pool import FakePool, FakeTier, ListMemory
from tests.engine.listener import Listener, really_held
from tests.tiers.seeds import seeds

ROOT = b"r" * 16
BLOCK, ROWS = 16, 48
WINDOW, SMALL = Window(40, BLOCK), Window(4, BLOCK)
UNIT = 2 * BLOCK


@dataclass(frozen=True)
class Kind:
    """The stores of a model, and the blocks of a small pool and a small host memory."""

    windows: tuple[Window | None, ...]
    num_blocks: int
    host_blocks: int
    state_blocks: int = 0


FULL = Kind((None,), 40, 30)
ALONE = Kind((WINDOW,), 16, 20)
MIXED = Kind((None, WINDOW, SMALL), 70, 60)
STATES = Kind((None,), 46, 40, state_blocks=3)
KINDS = {"full": FULL, "window": ALONE, "mixed": MIXED, "states": STATES}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)

TOKENS = list(range(300))
IDENTITIES = list(block_identities(ROOT, TOKENS, BLOCK))


def manager_of(kind: Kind, num_blocks: int, tier: Any = None) -> BlockManager:
    pool = FakePool(BLOCK, num_blocks, kind.state_blocks, UNIT if kind.state_blocks else 0)
    return BlockManager(pool, tier=tier, windows=kind.windows, most_rows=ROWS)


def two_tables(num_blocks: int, tier: FakeTier | None = None) -> BlockManager:
    """Make a manager with two tables of full layers."""
    return manager_of(Kind((None, None), 0, 0), num_blocks, tier)


def started(blocks: BlockManager, token_ids: Sequence[int]) -> tuple[SequenceBlocks, int]:
    held, covered = find_prefix(blocks, token_ids, ROOT)
    assert held.grow(covered, len(token_ids))
    return held, covered


def cached_prefix(blocks: BlockManager, token_ids: Sequence[int], root: bytes) -> int:
    """Return how many leading tokens are cached, without changing anything."""
    return find_prefix(copy.deepcopy(blocks), token_ids, root, compute_last=False)[1]


def published(blocks: BlockManager, token_ids: Sequence[int]) -> None:
    """Cache these tokens, and the states that an ending sequence could leave."""
    held, _ = started(blocks, token_ids)
    held.publish(token_ids, len(token_ids))
    if blocks.states is not None:
        kept = blocks.take(blocks.states.entry_blocks)
        held.publish_state(len(token_ids) // UNIT * UNIT, token_ids, kept)
        blocks.dereference(kept)
    held.free()


def copies_of(blocks: BlockManager) -> list[tuple[int, int]]:
    assert isinstance(blocks.pool, FakePool)
    return blocks.pool.copies


class Live:
    """A sequence: its tokens, how many of them have their KV, and how many it began with."""

    def __init__(self, held: SequenceBlocks, tokens: list[int], computed: int) -> None:
        self.held, self.tokens, self.computed = held, tokens, computed
        self.prompt = len(tokens)
        self.owned: set[int] = set()
        """All blocks that it had before a step."""


class Machine:
    """Random use of the stores of one kind, with a record of each block's content."""

    def __init__(self, kind: Kind, seed: int, has_tier: bool) -> None:
        self.kind, self.rng = kind, random.Random(seed)
        self.content: list[list[object]] = [[None] * BLOCK for _ in range(kind.num_blocks)]
        memory: Any = ListMemory(self.content, kind.host_blocks)
        tier = HostTier(memory) if has_tier else None
        self.blocks = manager_of(kind, kind.num_blocks, tier)
        self.log, self.listener = self.blocks.watch(), Listener()
        self.texts = [[self.rng.randrange(9) for _ in range(420)] for _ in range(2)]
        self.live: list[Live] = []
        self.lent: list[SequenceBlocks] = []
        self.hits = 0

    def act(self) -> None:
        match self.rng.randrange(8):
            case 0 if len(self.live) < 6:
                self.begin()
            case 1 if len(self.live) < 6:
                self.reserve()
            case 2:
                self.lend()
            case 3:
                self.fetch()
            case _ if self.live:
                index = self.rng.randrange(len(self.live))
                if self.rng.random() < 0.05 or not self.step(self.live[index]):
                    held = self.live.pop(index).held
                    held.free(), held.free()
        self.check_counts()

    def a_prompt(self) -> list[int]:
        tokens = self.rng.choice(self.texts)[: self.rng.randint(1, 300)]
        return tokens + self.rng.choices(range(9), k=self.rng.randint(0, 20))

    def begin(self) -> None:
        """Begin a sequence, as the scheduler does."""
        tokens = self.a_prompt()
        hands_over = self.rng.random() < 0.3
        found = admit(self.blocks, tokens, ROOT, hands_over=hands_over)
        if found is None:
            return
        held, covered = found
        self.hits += covered
        if held.state is not None:
            state = held.state.blocks
            assert covered % UNIT == 0 and bool(state) == (covered > 0)
            self.check_state(state, tokens[:covered])
            if state:
                held.publish_state(covered, tokens, state)
                held.state.drop()
            if hands_over:
                held.state.add()
        self.live.append(Live(held, tokens, covered))

    def reserve(self) -> None:
        """Reserve blocks, as a decode worker does for a prompt that another worker computes."""
        tokens = self.a_prompt()
        reserved = reserve_blocks(self.blocks, tokens, ROOT)
        if reserved is None:
            return
        held, covered = reserved
        self.hits += covered
        self.write(held, tokens, covered, len(tokens))
        self.check_reads(held, tokens, len(tokens), len(tokens))
        held.publish(tokens, len(tokens))
        if held.state is not None:
            point = len(tokens) // UNIT * UNIT
            self.write_state(held.state.blocks, tokens[:point])
            held.publish_state(point, tokens, held.state.blocks)
            held.state.drop()
        self.live.append(Live(held, tokens, len(tokens)))

    def step(self, live: Live) -> bool:
        """Run a chunk, or a token with drafts of which some are kept. Return False if the sequence ends or
        has no room.
        """
        tokens, computed, held = live.tokens, live.computed, live.held
        if len(tokens) > 400:
            return False
        in_prompt = computed < len(tokens)
        if in_prompt:
            end, kept = min(len(tokens), computed + self.rng.randint(1, ROWS)), 0
        else:
            drafted = self.rng.randint(1, 12)
            tokens = tokens + self.rng.choices(range(9), k=drafted)
            end, kept = len(tokens), self.rng.randint(1, drafted)
        live.owned.update(own_blocks(held))
        if not held.grow(computed, end):
            own, references = {*own_blocks(held)}, self.blocks.num_references
            # A prompt has its room, unless others refer to blocks that it has or has left behind its window.
            assert not in_prompt or any(references(block) > (block in own) for block in live.owned)
            return False
        self.write(held, tokens, computed, end)
        self.check_reads(held, tokens, computed, end)
        live.computed = computed + kept if kept else end
        held.commit(live.computed, [], tokens)
        live.tokens = tokens[: live.computed] if kept else tokens
        self.check_windows(live)
        self.keep_state(live)
        return True

    def check_windows(self, live: Live) -> None:
        for table in live.held.tables:
            if table.store.window is not None and len(table.blocks) * BLOCK <= live.prompt:
                window = table.store.window
                most = (window.span() + window.span(ROWS)) // BLOCK  # the found blocks, and its own
                assert len(table.blocks) - table.num_left <= most

    def keep_state(self, live: Live) -> None:
        held, states = live.held, self.blocks.states
        if states is None or live.computed < UNIT or self.rng.random() < 0.3:
            return
        position = live.computed // UNIT * UNIT
        if held.lacks_state(position) and self.blocks.available >= states.entry_blocks:
            assert held.state is not None
            held.state.age()
            kept = self.blocks.take(states.entry_blocks)
            self.write_state(kept, live.tokens[:position])
            held.publish_state(position, live.tokens, kept)
            self.blocks.dereference(kept)

    def lend(self) -> None:
        if self.lent and self.rng.random() < 0.6:
            self.lent.pop().free()
            return
        tokens, first = self.a_prompt(), self.rng.choice([0, 0, 3])
        identities = list(block_identities(ROOT, tokens, BLOCK))
        held = hold_blocks(self.blocks, identities[first:], first)
        end = first + len(held.identities)
        assert held.identities == identities[first:end]
        for table, blocks in zip(held.tables, held.blocks, strict=True):
            for place, block in enumerate(blocks[table.num_left :], table.num_left + first):
                self.check_block(table.store.number, block, tokens, place)
            assert table.num_left <= max(table.store.first_place(end * BLOCK) - first, 0)
        if self.blocks.states is not None:
            assert bool(held.state_blocks) == (end > first)
            self.check_state(held.state_blocks, tokens[: end * BLOCK])
        self.lent.append(held)

    def fetch(self) -> None:
        """Take blocks from another worker before the prompt itself."""
        tokens = self.a_prompt()
        room = find_room(self.blocks, tokens, ROOT)
        if room is None:
            return
        held, first = room.sequence_blocks, room.covered // BLOCK
        count = self.rng.randint(0, len(room.wanted))
        end = first + count
        if count and self.blocks.states is not None:
            count -= end % 2  # the holder ends at a state
            end = first + count
        if count:
            sent = 0
            for table in held.tables:
                place = max(table.store.first_place(end * BLOCK), first)
                for offset in range(end - place):
                    block = table.blocks[first + offset]
                    self.write_block(table.store.number, block, tokens, place + offset)
                sent += end - place
            assert sent == room.num_sent(count)
            if self.blocks.states is not None:
                after = room.extents[0].blocks[end : end + self.blocks.states.entry_blocks]
                self.write_state(after, tokens[: end * BLOCK])
        room.keep(count)
        assert not count or cached_prefix(self.blocks, [*tokens[: end * BLOCK], 99], ROOT) >= end * BLOCK

    # --- contents ---

    def write(self, held: SequenceBlocks, tokens: Sequence[int], first: int, end: int) -> None:
        copies = copies_of(self.blocks)
        for source, target in copies:
            self.content[target] = list(self.content[source])
        copies.clear()
        for table in held.tables:
            for position in range(max(first, table.num_left * BLOCK), end):
                block = table.blocks[position // BLOCK]
                self.check_writable(block)
                self.content[block][position % BLOCK] = value(table.store.number, tokens, position)

    def write_block(self, table: int, block: int, tokens: Sequence[int], place: int) -> None:
        self.check_writable(block)
        positions = range(place * BLOCK, (place + 1) * BLOCK)
        self.content[block] = [value(table, tokens, position) for position in positions]

    def write_state(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        for part, block in enumerate(blocks):
            self.check_writable(block)
            self.content[block] = [("state", hash(tuple(tokens)), part)] * BLOCK

    def check_writable(self, block: int) -> None:
        pool = self.blocks
        assert pool.num_references(block) == 1 and not pool.is_locked(block)

    def check_reads(self, held: SequenceBlocks, tokens: Sequence[int], first: int, end: int) -> None:
        """Check that rows from `first` on find all keys of the tiles of the first one's window."""
        for table in held.tables:
            for position in range(table.store.first_place(first) * BLOCK, end):
                block = table.blocks[position // BLOCK]
                assert self.content[block][position % BLOCK] == value(table.store.number, tokens, position)

    def check_block(self, table: int, block: int, tokens: Sequence[int], place: int) -> None:
        positions = range(place * BLOCK, (place + 1) * BLOCK)
        assert self.content[block] == [value(table, tokens, position) for position in positions]

    def check_state(self, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        for part, block in enumerate(blocks):
            assert self.content[block] == [("state", hash(tuple(tokens)), part)] * BLOCK

    def check_counts(self) -> None:
        everyone = [*(live.held for live in self.live), *self.lent]
        used = {block for held in everyone for block in own_blocks(held)}
        assert self.blocks.available == self.blocks.num_blocks - len(used)
        self.listener.hear(self.log.take())
        assert self.listener.held == really_held(self.blocks)
        if self.blocks.states is not None:  # a state can be used: the blocks of its tokens are here
            tables = self.blocks.tables[0].entries
            assert self.blocks.tier is not None or self.blocks.states.entries.keys() <= tables.keys()


def value(table: int, tokens: Sequence[int], position: int) -> int:
    return hash((table, *tokens[: position + 1]))


def own_blocks(held: SequenceBlocks) -> list[int]:
    """Return the blocks in all stores, without empty places."""
    return [*held.state_blocks, *(block for table in held.tables for block in table.blocks[table.num_left :])]


@each_kind
@pytest.mark.parametrize("has_tier", [False, True])
@pytest.mark.parametrize("seed", seeds(3))
def test_rows_read_the_kv_written_for_them(kind: Kind, has_tier: bool, seed: int) -> None:
    machine = Machine(kind, seed, has_tier)
    for _ in range(700):
        machine.act()
    assert machine.hits > 400
    for held in (*machine.lent, *(live.held for live in machine.live)):
        held.free()
    assert machine.blocks.available == kind.num_blocks


# --- room -------------------------------------------------------------------------------------------


def test_new_blocks_are_adjacent_if_possible() -> None:
    blocks = manager_of(FULL, 16)
    first, _ = started(blocks, [0] * 80)
    first.free()
    assert started(blocks, [0] * 160)[0].blocks[0] == list(range(10))


def test_the_least_recently_used_blocks_go_first() -> None:
    """The last block of a sequence goes before its earlier ones."""
    blocks, other = manager_of(FULL, 5), TOKENS[100:132]
    for token_ids in (TOKENS[:32], other):
        published(blocks, token_ids)
    started(blocks, TOKENS[:33])[0].free()
    expected = [*block_identities(ROOT, other, BLOCK)][::-1] + IDENTITIES[1::-1]
    gone: list[bytes] = []
    while blocks.available:
        before = [*blocks.tables[0].entries]
        blocks.take(1)
        gone += [identity for identity in before if identity not in blocks.tables[0].entries]
    assert gone == expected and (blocks.num_free, blocks.num_cached) == (0, 0)


def test_room_is_taken_in_all_tables_or_in_none() -> None:
    blocks = manager_of(MIXED, 10)
    held, _ = find_prefix(blocks, TOKENS[:10], ROOT)
    assert not held.grow(0, 64)
    assert reserve_blocks(blocks, TOKENS[:64], ROOT) is None
    assert blocks.available == 10 and held.blocks == [[], [], []]
    assert not held.grow(0, 30, spare=2)
    assert held.grow(0, 30, spare=1) and blocks.available == 4
    assert held.extents() == [Extent(0, [0, 1]), Extent(1, [2, 3]), Extent(2, [4, 5])]


def test_blocks_freed_behind_the_window_are_reused_at_the_end() -> None:
    """The sequence keeps them until it has all its places, so nobody else takes them."""
    blocks = manager_of(Kind((None, WINDOW), 0, 0), 40)
    held, _ = find_prefix(blocks, TOKENS, ROOT)
    assert held.grow(0, len(TOKENS), ROWS)
    room = WINDOW.span(ROWS) // BLOCK
    for position in (100, 200):
        held.leave(position)
        left = WINDOW.first_place(position)
        assert held.first_places == [0, left]
        assert list(map(len, held.blocks)) == [19, min(room + left, 19)]
        assert blocks.available == 40 - 19 - min(room, 19 - left)


def test_a_state_that_was_read_makes_room_for_the_one_to_be_handed_over() -> None:
    blocks = manager_of(STATES, 4 + 3)
    published(blocks, TOKENS[:40])
    for hands_over in (True, False):
        found = admit(blocks, TOKENS[:64], ROOT, hands_over=hands_over)
        assert (found is not None and found[1] == 32) or not hands_over
        if found is not None:
            found[0].free()
    other = admit(blocks, TOKENS[100:150], ROOT, hands_over=True)
    assert other is not None and blocks.available == 3


LEAST = 5


def test_without_paging_the_first_token_takes_the_longest_sequences_room() -> None:
    blocks = manager_of(FULL, 12)
    blocks.least_tokens = LEAST * BLOCK
    prompt = TOKENS[: 2 * BLOCK]
    first, covered = find_prefix(blocks, prompt, ROOT)
    first.grow(covered, len(prompt))
    for length in range(len(prompt), LEAST * BLOCK + 1):
        first.grow(length - 1, length)
        assert blocks.available == 12 - LEAST
    first.publish(prompt, len(prompt))
    reserved = reserve_blocks(blocks, prompt, ROOT)
    assert reserved is not None
    second, covered = reserved
    assert covered == len(prompt) and second.blocks[0][:2] == first.blocks[0][:2]
    assert blocks.available == 12 - LEAST - (LEAST - 2), "a shared prefix is part of it"
    assert second.extents(2) == [Extent(0, first.blocks[0][:2])]
    assert not SequenceBlocks(blocks, ROOT).grow(0, 1), "five are needed, four are available"
    second.free(), first.free()
    assert blocks.available == 12 and blocks.num_cached == 2


# --- copies, publication ----------------------------------------------------------------------------


@pytest.mark.parametrize("is_drafted", [True, False])
def test_a_copied_block_has_its_sources_draft_kv_flag(is_drafted: bool) -> None:
    """The target may be a block that had draft KV before."""
    blocks = manager_of(FULL, 4)
    first, _ = started(blocks, TOKENS[:32])
    first.publish(TOKENS, 32)
    if is_drafted:
        first.mark_drafted(32)
    second, _ = started(blocks, TOKENS[:32])
    assert len(copies_of(blocks)) == 1
    assert second.num_drafted == (32 if is_drafted else 0)


@pytest.mark.parametrize(("kind", "is_shared"), [(FULL, False), (STATES, True)])
def test_with_kept_states_blocks_computed_twice_become_one(kind: Kind, is_shared: bool) -> None:
    """The prefix of a state must not age before it."""
    blocks = manager_of(kind, 8)
    first, second = started(blocks, TOKENS[:32])[0], started(blocks, TOKENS[:32])[0]
    first.publish(TOKENS, 32), second.publish(TOKENS, 32)
    assert (second.blocks == first.blocks) is is_shared
    assert blocks.available == 8 - (2 if is_shared else 4)
    first.free(), second.free()
    assert (blocks.available, blocks.num_cached) == (8, 2)


def test_tokens_before_the_window_count_as_drafted() -> None:
    blocks = manager_of(Kind((Window(24, BLOCK),), 0, 0), 40)
    held = SequenceBlocks(blocks, ROOT)
    assert held.grow(0, 300, 64)
    for end in range(60, 301, 60):
        held.commit(end, [], [*range(300)])
    assert held.num_drafted == held.first_kept == 256
    held.mark_drafted(300)
    assert held.num_drafted == 288
    assert sum(blocks.drafted) == 2


def test_without_prefix_caching_nothing_is_kept() -> None:
    blocks = BlockManager(FakePool(BLOCK, 4), enable_prefix_caching=False)
    held, _ = started(blocks, TOKENS[:32])
    held.publish(TOKENS, 32)
    assert cached_prefix(blocks, TOKENS, ROOT) == 0
    held.free()
    assert (blocks.num_free, blocks.num_cached) == (4, 0)


def test_a_chain_moves_nothing_and_a_tree_moves_before_its_blocks_are_published() -> None:
    blocks = two_tables(16)
    assert isinstance(blocks.pool, FakePool)
    held, _ = started(blocks, TOKENS[:48])
    held.commit(14, [0, 1], TOKENS)
    assert not blocks.pool.moves and len(held.identities) == 1
    held.commit(30, [1, 3], TOKENS)
    assert blocks.pool.moves == [(held.blocks, 30, [1, 3])] and len(held.identities) == 2


def test_states_already_continued_from_go_first_and_shared_ones_last() -> None:
    """Two turns of a chat, and another chat with its preamble, in a pool that holds little more."""
    blocks = manager_of(STATES, 26)
    assert blocks.states is not None
    states, preamble = blocks.states, [0] * UNIT

    def kept(token_ids: list[int]) -> list[int]:
        identities = enumerate(block_identities(ROOT, token_ids, BLOCK), 1)
        return [place * BLOCK for place, identity in identities if identity in states.entries]

    def asked(token_ids: list[int], positions: Sequence[int]) -> None:
        held, covered = find_prefix(blocks, token_ids, ROOT)
        assert held.state is not None
        held.state.drop()
        assert held.grow(covered, len(token_ids))
        held.publish(token_ids, len(token_ids))
        for position in positions:
            held.state.age()
            taken = blocks.take(3)
            held.publish_state(position, token_ids, taken)
            blocks.dereference(taken)
        held.free()

    other, chat, third = [*preamble, *[1] * BLOCK], [*preamble, *[2] * 64], [*preamble, *[3] * 48]
    asked(other, ())
    asked(third, (UNIT, 2 * UNIT))
    asked(chat[:68], (2 * UNIT,))
    asked(chat, (3 * UNIT,))
    assert kept(chat) == [UNIT, 2 * UNIT, 3 * UNIT] and kept(third) == [UNIT, 2 * UNIT]
    crowd = find_prefix(blocks, [], ROOT)[0]
    for chats_states, thirds_states in (([UNIT, 3 * UNIT], [UNIT, 2 * UNIT]), ([UNIT, 3 * UNIT], [UNIT])):
        before = kept(chat), kept(third)
        while (kept(chat), kept(third)) == before:
            assert crowd.grow(0, (len(crowd.blocks[0]) + 1) * BLOCK)
        assert (kept(chat), kept(third)) == (chats_states, thirds_states)


# --- lower tiers ------------------------------------------------------------------------------------


def test_loaded_blocks_are_reported_with_their_tokens() -> None:
    blocks = manager_of(FULL, 8, FakeTier(IDENTITIES))
    published(blocks, TOKENS[:16])
    log = blocks.watch()
    log.take()
    found = admit(blocks, TOKENS[:50], ROOT)
    assert found is not None and found[1] == 48
    told = [(event.kind, event.token_ids) for event in log.take()]
    assert told == [("stored", TOKENS[16:32]), ("stored", TOKENS[32:48])]


class LosesStates(FakeTier):
    """A tier that loses the last block of each state while it is loaded."""

    def load(self, names: Sequence[bytes], block_ids: Sequence[int]) -> int:
        self.lost = int(len(names) == STATES.state_blocks)
        return super().load(names, block_ids)


@pytest.mark.parametrize(("kind", "lost"), [(FakeTier, 0), (LosesStates, 0), (FakeTier, 1)])
def test_a_state_is_loaded_with_its_tokens(kind: type[FakeTier], lost: int) -> None:
    """If a part of the state or a block of its tokens is lost, neither is used."""
    names = state_identities(IDENTITIES[3], STATES.state_blocks)
    is_lost = kind is LosesStates or lost > 0
    blocks = manager_of(STATES, 12, kind([*IDENTITIES, *names], lost))
    log = blocks.watch()
    assert missing_blocks(blocks, TOKENS[:70], ROOT) == ([*IDENTITIES[:4], *names], 0)
    found = admit(blocks, TOKENS[:70], ROOT)
    assert found is not None
    held, covered = found
    assert (covered, len(held.state_blocks)) == ((0, 0) if is_lost else (64, 3))
    told = [event.identity for event in log.take() if event.kind == "stored"]
    assert told == ([] if is_lost else [IDENTITIES[3]])
    held.free()
    assert blocks.available == 12 and cached_prefix(blocks, TOKENS[:70], ROOT) == covered


def test_the_disk_is_asked_for_the_blocks_that_the_next_row_reads() -> None:
    disk = FakeTier([*IDENTITIES[:3], *IDENTITIES[9:13]])
    blocks = manager_of(ALONE, 20, disk)
    published(blocks, TOKENS[:150])
    assert missing_blocks(blocks, TOKENS, ROOT) == (IDENTITIES[9:13], 18 - 13)
    disk.names.remove(IDENTITIES[11])
    assert missing_blocks(blocks, TOKENS, ROOT) == (IDENTITIES[9:11], 18 - 11)
    full = manager_of(FULL, 20, FakeTier(IDENTITIES[:7]))
    published(full, TOKENS[:70])
    assert missing_blocks(full, TOKENS, ROOT) == (IDENTITIES[4:7], 18 - 7)


@pytest.mark.parametrize(("num_tokens", "first"), [(230, 8), (270, 12)])
@pytest.mark.parametrize("lost", [0, 2, 4])
def test_a_reservation_has_the_window_of_its_last_row(lost: int, num_tokens: int, first: int) -> None:
    """Another worker fills the blocks that the lower tier has lost."""
    blocks = manager_of(ALONE, 20, FakeTier(IDENTITIES[8:12], lost))
    reserved = reserve_blocks(blocks, TOKENS[:num_tokens], ROOT)
    assert reserved is not None
    held, covered = reserved
    assert (held.first_places, covered) == ([first], max(12 - lost * (first < 12), first) * BLOCK)
    assert held.identities == IDENTITIES[: covered // BLOCK]
    held.publish(TOKENS, num_tokens)
    assert held.identities == IDENTITIES[: num_tokens // BLOCK]
    held.free()
    assert blocks.available == 20


@pytest.mark.parametrize(("lost", "covered"), [(0, 191), (1, 176), (2, 160)])
def test_a_window_is_loaded_behind_blocks_of_the_pool(lost: int, covered: int) -> None:
    """A fully cached prompt's last block is copied. Losses that move the window start a new search."""
    tier = FakeTier([table_identity(each, 1) for each in IDENTITIES], lost)
    blocks, here = with_all_but_the_window(tier)
    held, found = find_prefix(blocks, TOKENS[:192], ROOT)
    assert (found, held.first_places, held.below) == (128, [0, 8], IDENTITIES[8:12])
    assert held.blocks[0] == here
    held.free()
    admitted = admit(blocks, TOKENS[:192], ROOT)
    assert admitted is not None and admitted[1] == covered
    assert tier.asked[:4] == [table_identity(each, 1) for each in IDENTITIES[8:12]], "only what lies below"
    assert [source for source, _ in copies_of(blocks)][:1] == here[-1:]
    admitted[0].free()
    assert blocks.available == 60


def with_all_but_the_window(tier: FakeTier) -> tuple[BlockManager, list[int]]:
    """Return a manager whose pool has the first twelve blocks of the full layers, and these blocks."""
    blocks = manager_of(Kind((None, SMALL), 0, 0), 60, tier)
    here = blocks.take(12)
    for identity, block in zip(IDENTITIES, here, strict=False):
        blocks.tables[0].publish(identity, [block])
    blocks.dereference(here)
    return blocks, here


def test_a_window_lost_by_the_lower_tier_is_computed_again() -> None:
    """The first row to compute would read blocks before the ones found."""
    blocks = manager_of(ALONE, 20, FakeTier(IDENTITIES[8:12], 4))
    admitted = admit(blocks, TOKENS[:200], ROOT)
    assert admitted is not None and (admitted[1], admitted[0].first_places) == (0, [0])


def test_a_reservation_searches_again_after_a_loss() -> None:
    """Another worker writes to its blocks."""
    tier = FakeTier([table_identity(each, 1) for each in IDENTITIES], 1)
    blocks, here = with_all_but_the_window(tier)
    reserved = reserve_blocks(blocks, TOKENS[:192], ROOT)
    assert reserved is not None
    held, covered = reserved
    assert covered == 176 and held.blocks[0][:11] == here[:11] and held.blocks[0][11] not in here
    held.free()
    assert blocks.available == 60


# --- blocks from and for other workers --------------------------------------------------------------


@each_kind
def test_the_last_tokens_block_is_not_requested(kind: Kind) -> None:
    blocks = manager_of(kind, 70)
    room = find_room(blocks, TOKENS[:128], ROOT)
    assert room is not None and len(room.wanted) == 7
    assert len(room.extents[0].blocks) == min(7, len(room.sequence_blocks.blocks[0])) + kind.state_blocks
    room.sequence_blocks.free()
    assert blocks.num_free == 70


@each_kind
def test_a_full_pool_has_no_room(kind: Kind) -> None:
    blocks = manager_of(kind, 3)
    assert find_room(blocks, TOKENS, ROOT) is None and blocks.available == 3
    room = find_room(blocks, TOKENS[:8], ROOT)
    assert room is not None and not room.wanted
