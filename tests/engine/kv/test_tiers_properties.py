"""Random use of the block manager over a host tier, compared with a plain model of both, on fake memory."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from engine.kv.block_manager import BlockManager
from engine.kv.tiers.host import HostTier
from protocol.ids import BlockIdentity, child_identity
from tests.engine.fake_pool import ListMemory
from tests.engine.kv.test_block_manager_properties import (
    ROOTS,
    STATEFUL,
    BlockManagerMachine,
    ModelBlock,
    ModelTable,
    Prefix,
    tokens,
)


class HostTierMachine(BlockManagerMachine):
    """Every start is an admission: it takes room for the whole prompt, then loads the host tier's part."""

    @initialize(
        num_blocks=st.integers(1, 8), block_size=st.sampled_from([1, 2, 2, 3]), host_slots=st.integers(1, 6)
    )
    def make(self, num_blocks: int, block_size: int, host_slots: int) -> None:
        BlockManagerMachine.make(self, num_blocks, block_size)
        self.tier = HostTier(ListMemory(self.content, host_slots))
        self.manager = BlockManager(self.pool, tier=self.tier)
        self.log = self.manager.watch()
        self.host: list[Prefix] = []
        """Ordered from the least recently used."""
        self.below: list[Prefix] = []
        self.limit = 0
        self.hits = 0

    @rule(root=st.sampled_from([0, 0, 0, 1]), token_ids=tokens(1, 8), compute_last=st.booleans())
    def start(self, root: int, token_ids: list[int], compute_last: bool) -> None:
        device = len(self.cached_blocks(root, token_ids))
        self.below = self.host_blocks(root, token_ids, device)
        for prefix in reversed(self.below):
            self.use(prefix)
        self.limit = len(token_ids) - 1 if compute_last else len(token_ids)
        before = len(self.live)
        BlockManagerMachine.start(self, root, token_ids, compute_last, now=True)
        self.below = []
        if len(self.live) > before and self.live[-1].num_written < len(token_ids):
            self.free(len(self.live) - 1, False)  # there was no room for it

    def host_blocks(self, root: int, token_ids: list[int], first: int) -> list[Prefix]:
        ends = range((first + 1) * self.block_size, len(token_ids) + 1, self.block_size)
        prefixes = [(root, *token_ids[:end]) for end in ends]
        return list(itertools.takewhile(self.host.__contains__, prefixes))

    def use(self, prefix: Prefix) -> None:
        if prefix in self.host:
            self.host.remove(prefix)
        elif len(self.host) == self.tier.capacity:
            del self.host[0]
        self.host.append(prefix)

    def evict(self, block: ModelBlock) -> None:
        BlockManagerMachine.evict(self, block)
        assert block.published_as is not None
        self.use(block.published_as)

    def bring(self, table: ModelTable, covered: int) -> int:
        loaded = len(list(itertools.takewhile(self.host.__contains__, self.below)))
        got = table.real.fill(covered, self.limit if self.below else len(table.token_ids))
        if loaded:
            first = table.num_published
            covered = min((first + loaded) * self.block_size, self.limit)
            for index in range(first, covered // self.block_size):
                self.share(table, index)
            table.num_published = covered // self.block_size
            table.num_written = covered
            self.hits += loaded
        assert got == covered
        assert len(table.real.identities) == table.num_published, "never written while published"
        return covered

    @invariant()
    def the_same_blocks_are_in_the_host(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert self.tier.num_blocks == len(self.host)
        for prefix in self.ever_published:
            assert self.tier.holds(self.identity(prefix)) == (prefix in self.host)
        assert self.tier.counters.hit_blocks == self.hits

    def identity(self, prefix: Prefix) -> BlockIdentity:
        root, *token_ids = prefix
        identity = ROOTS[root]
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            identity = child_identity(identity, token_ids[end - self.block_size : end])
        return identity

    @invariant()
    def no_slot_is_lost(self) -> None:
        if hasattr(self, "tier"):
            assert len(self.tier._free) + self.tier.num_blocks == self.tier.capacity


TestBlockManagerOverHostTier = HostTierMachine.TestCase
TestBlockManagerOverHostTier.settings = STATEFUL
