"""Which worker has computed the KV of which prefix, as far as this router can tell.

It saw every token that the workers emitted, so it knows what they published; it does not know what they have
evicted since. A wrong guess costs a question to the worker, nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from protocol.ids import BlockIdentity, block_identities, root_identity
from router.registry import WorkerKey

BLOCK_TOKENS = 64
"""Prefixes are told apart in steps of so many tokens, whatever the size of the workers' blocks."""

MAX_BLOCKS = 2**16
"""Remembered of the prefixes used last: four million tokens."""


class PrefixDirectory:
    """Belongs to the event loop."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: OrderedDict[BlockIdentity, set[WorkerKey]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, worker: WorkerKey, token_ids: Sequence[int], cache_salt: str) -> None:
        """The worker has the KV of these tokens."""
        for identity in reversed(_identities(token_ids, cache_salt)):
            self._holders.setdefault(identity, set()).add(worker)
            self._holders.move_to_end(identity)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def find(self, token_ids: Sequence[int], cache_salt: str) -> dict[WorkerKey, int]:
        """How many leading tokens each worker should have, those that have some."""
        found: dict[WorkerKey, int] = {}
        holders: set[WorkerKey] | None = None
        for index, identity in enumerate(_identities(token_ids, cache_salt), 1):
            here = self._holders.get(identity, set())
            holders = here if holders is None else holders & here
            if not holders:
                break
            found |= dict.fromkeys(holders, index * BLOCK_TOKENS)
        return found


def _identities(token_ids: Sequence[int], cache_salt: str) -> list[BlockIdentity]:
    """The directory's own, not the workers'."""
    return list(block_identities(root_identity("", "", cache_salt), token_ids, BLOCK_TOKENS))
