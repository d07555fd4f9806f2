"""Looks into a block manager without changing it."""

import copy
from collections.abc import Sequence

from engine.kv.block_manager import BlockManager
from engine.kv.prefix_cache import find_prefix
from protocol.ids import BlockIdentity


def cached_prefix(manager: BlockManager, token_ids: Sequence[int], root: BlockIdentity) -> int:
    """Return how many leading tokens are cached."""
    _, covered = find_prefix(copy.deepcopy(manager), token_ids, root, compute_last=False)
    return covered
