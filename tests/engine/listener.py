"""Tracks a prefix cache by its events alone."""

from __future__ import annotations

from collections.abc import Sequence

from engine.kv.block_manager import BlockManager
from engine.kv.cache_events import CacheEvent
from engine.kv.tiers.host import HostTier
from protocol.ids import BlockIdentity, child_identity
from protocol.kv_events import Medium

Held = set[tuple[Medium, BlockIdentity]]


class Listener:
    def __init__(self) -> None:
        self.held: Held = set()

    def hear(self, events: Sequence[CacheEvent]) -> None:
        """Take events, checking that none is repeated and that those of computed blocks include their
        identity's inputs.
        """
        for event in events:
            block = (event.medium, event.identity)
            if event.kind == "cleared":
                self.held.clear()
            elif event.kind == "removed":
                self.held.remove(block)
            else:
                assert block not in self.held
                self.held.add(block)
            if event.token_ids:
                assert child_identity(event.parent, event.token_ids) == event.identity


def really_held(manager: BlockManager) -> Held:
    """Return the held states if the model has some, else the first table's blocks, including lower tiers if
    it is the only table.
    """
    told = manager.states if manager.states is not None else manager.tables[0]
    held = {(Medium.GPU, identity) for identity in told.entries}
    return held | held_below(manager.tier) if manager.tier and manager.stores == [told] else held


def held_below(tier: HostTier) -> Held:
    held = {(Medium.CPU, identity) for identity in tier._slot_of}
    if tier._disk is not None:
        held |= {(Medium.STORAGE, identity) for identity in tier._disk._slot_of}
    return held
