"""Random use of the block manager on a fake pool, compared with a plain model that counts by inspection."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.kv.block_manager import BlockManager
from engine.kv.prefix_cache import find_prefix
from engine.kv.sequence_blocks import SequenceBlocks
from protocol.ids import block_identities, root_identity
from tests.engine.cached_prefix import cached_prefix
from tests.engine.fake_pool import FakePool
from tests.engine.listener import Listener, really_held

ROOTS = [root_identity("model", "fp32"), root_identity("model", "fp32", "salt")]
Prefix = tuple[int, ...]
"""Root number and token ids up to a point. KV depends on these, so they stand for a written slot's
content.
"""


def tokens(shortest: int, longest: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 1), min_size=shortest, max_size=longest)


@dataclass(eq=False)
class ModelBlock:
    published_as: Prefix | None = None
    last_used: int = 0


@dataclass(eq=False)
class ModelTable:
    root: int
    token_ids: list[int]
    real: SequenceBlocks
    blocks: list[ModelBlock] = field(default_factory=list)
    num_written: int = 0
    num_published: int = 0

    def prefix(self, num_tokens: int) -> Prefix:
        return (self.root, *self.token_ids[:num_tokens])


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 8), block_size=st.sampled_from([1, 2, 2, 3]))
    def make(self, num_blocks: int, block_size: int) -> None:
        self.pool = FakePool(block_size, num_blocks)
        self.manager = BlockManager(self.pool)
        self.log, self.listener = self.manager.watch(), Listener()
        self.block_size = block_size
        self.content: list[list[Prefix | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.live: list[ModelTable] = []
        self.cache: dict[Prefix, ModelBlock] = {}
        self.ever_published: set[Prefix] = set()
        self.clock = 0

    # --- the plain model ---

    def holders(self, block: ModelBlock) -> int:
        return sum(table.blocks.count(block) for table in self.live)

    def evictable(self) -> list[ModelBlock]:
        unused = [block for block in self.cache.values() if self.holders(block) == 0]
        return sorted(unused, key=lambda block: block.last_used)

    def num_used(self) -> int:
        return len({id(block) for table in self.live for block in table.blocks})

    def num_free(self) -> int:
        return self.manager.num_blocks - self.num_used() - len(self.evictable())

    def touch(self, block: ModelBlock) -> None:
        self.clock += 1
        block.last_used = self.clock

    def cached_blocks(self, root: int, token_ids: list[int]) -> list[ModelBlock]:
        found = []
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            block = self.cache.get((root, *token_ids[:end]))
            if block is None:
                break
            found.append(block)
        return found

    # --- what an engine does ---

    def a_table(self, choice: int) -> ModelTable:
        return self.live[choice % len(self.live)]

    @rule(
        root=st.sampled_from([0, 0, 0, 1]),
        token_ids=tokens(1, 8),
        compute_last=st.booleans(),
        now=st.booleans(),
    )
    def start(self, root: int, token_ids: list[int], compute_last: bool, now: bool) -> None:
        expected = self.cached_blocks(root, token_ids)
        covered = len(expected) * self.block_size
        assert cached_prefix(self.manager, token_ids, ROOTS[root]) == covered
        real, num_covered = find_prefix(self.manager, token_ids, ROOTS[root], compute_last=compute_last)
        assert num_covered == (min(covered, len(token_ids) - 1) if compute_last else covered)
        table = ModelTable(root, token_ids, real, expected, num_covered, len(expected))
        self.live.append(table)
        if now and self.write(table, [], 0):
            self.publish_committed(table, 0)

    @precondition(lambda self: self.live)
    @rule(
        choice=st.integers(0, 7),
        extra=tokens(0, 4),
        rewind=st.sampled_from([0, 0, 0, 1, 2]),
        behind=st.integers(0, 2),
    )
    def step(self, choice: int, extra: list[int], rewind: int, behind: int) -> None:
        table = self.a_table(choice)
        if self.write(table, extra, rewind):
            self.publish_committed(table, behind)

    def write(self, table: ModelTable, extra: list[int], rewind: int) -> bool:
        """Write some tokens: the rest of the prompt, new ones, or, as after rejected drafts, some again."""
        write_from = max(0, table.num_written - rewind)
        rejected = table.token_ids[write_from : table.num_written]
        others = [1 - token for token in rejected]
        token_ids = table.token_ids[:write_from] + others + table.token_ids[table.num_written :] + extra
        touched = range(write_from // self.block_size, -(-len(token_ids) // self.block_size))
        if write_from >= len(token_ids):
            touched = range(0)
        copied = [
            index
            for index in touched
            if index < len(table.blocks)
            and (self.holders(table.blocks[index]) > 1 or table.blocks[index].published_as is not None)
        ]
        wanted = -(-len(token_ids) // self.block_size)
        needed = len(copied) + max(0, wanted - len(table.blocks))
        before = (list(table.real.blocks[0]), list(table.real.identities))
        if needed > self.num_free() + len(self.evictable()):
            assert not table.real.grow(write_from, len(token_ids))
            assert (table.real.blocks[0], table.real.identities) == before
            return False
        num_evicted = max(0, needed - self.num_free())
        for block in self.evictable()[:num_evicted]:
            self.evict(block)
        self.pool.copies.clear()
        available = self.manager.available
        assert table.real.grow(write_from, len(token_ids))
        dropped_only = [index for index in copied if self.holders(table.blocks[index]) == 1]
        assert self.manager.available == available - needed + len(dropped_only)
        copies = self.pool.copies
        assert [source for source, _ in copies] == [before[0][index] for index in copied]
        assert [target for _, target in copies] == [table.real.blocks[0][index] for index in copied]
        for source, target in copies:
            self.content[target] = list(self.content[source])
        for index in reversed(copied):
            dropped, table.blocks[index] = table.blocks[index], ModelBlock()
            if self.holders(dropped) == 0:
                self.touch(dropped)
        table.blocks.extend(ModelBlock() for _ in range(wanted - len(table.blocks)))
        table.token_ids = token_ids
        if write_from < len(token_ids):
            table.num_published = min(table.num_published, write_from // self.block_size)
        self.fill(table, self.bring(table, write_from))
        return True

    def evict(self, block: ModelBlock) -> None:
        assert block.published_as is not None
        del self.cache[block.published_as]

    def bring(self, table: ModelTable, covered: int) -> int:
        """Return the tokens covered by the lower tiers, which this manager lacks."""
        return covered

    def fill(self, table: ModelTable, write_from: int) -> None:
        for position in range(write_from, len(table.token_ids)):
            index = position // self.block_size
            assert self.holders(table.blocks[index]) == 1, "never written while shared"
            assert table.blocks[index].published_as is None, "never written while published"
            slots = self.content[table.real.blocks[0][index]]
            slots[position % self.block_size] = table.prefix(position + 1)
        table.num_written = max(table.num_written, len(table.token_ids))

    def publish_committed(self, table: ModelTable, behind: int) -> None:
        num_committed = max(0, table.num_written - behind)
        table.real.publish(table.token_ids, num_committed)
        for index in range(table.num_published, num_committed // self.block_size):
            self.share(table, index)
        table.num_published = max(table.num_published, num_committed // self.block_size)

    def share(self, table: ModelTable, index: int) -> None:
        prefix = table.prefix((index + 1) * self.block_size)
        block = table.blocks[index]
        if prefix not in self.cache and block.published_as is None:
            self.cache[prefix] = block
            block.published_as = prefix
            self.ever_published.add(prefix)

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 7), twice=st.booleans())
    def free(self, choice: int, twice: bool) -> None:
        table = self.a_table(choice)
        table.real.free()
        if twice:
            table.real.free()
        assert table.real.blocks[0] == []
        self.live.remove(table)
        for block in reversed(table.blocks):
            if self.holders(block) == 0:
                self.touch(block)

    @rule()
    def free_all(self) -> None:
        while self.live:
            self.free(0, False)
        assert self.manager.num_free + self.manager.num_cached == self.manager.num_blocks

    # --- invariants ---

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        assert self.manager.available == self.manager.num_blocks - self.num_used()
        assert self.manager.num_cached == len(self.evictable())
        assert self.manager.num_free == self.num_free()

    @invariant()
    def tables_hold_their_own_content(self) -> None:
        """Check that a block is in two tables only if the model shares it, and that it holds the written
        content.
        """
        owner: dict[int, ModelBlock] = {}
        for table in getattr(self, "live", []):
            assert len(table.real.blocks[0]) == len(table.blocks)
            for real, model in zip(table.real.blocks[0], table.blocks, strict=True):
                assert owner.setdefault(real, model) is model
            for position in range(table.num_written):
                block = table.real.blocks[0][position // self.block_size]
                slot = self.content[block][position % self.block_size]
                assert slot == table.prefix(position + 1)
            known = list(block_identities(ROOTS[table.root], table.token_ids, self.block_size))
            assert table.real.identities == known[: table.num_published]

    @invariant()
    def the_same_prefixes_are_cached(self) -> None:
        """Check that every eviction followed the model's order."""
        for root, *token_ids in getattr(self, "ever_published", ()):
            expected = len(self.cached_blocks(root, token_ids)) * self.block_size
            assert cached_prefix(self.manager, token_ids, ROOTS[root]) == expected

    @invariant()
    def the_log_tells_what_is_held(self) -> None:
        if hasattr(self, "listener"):
            self.listener.hear(self.log.take())
            assert self.listener.held == really_held(self.manager)


TestBlockManagerAgainstModel = BlockManagerMachine.TestCase
STATEFUL = settings(
    max_examples=50,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestBlockManagerAgainstModel.settings = STATEFUL
