"""The blocks of a prompt as the workers identify them, and their keys in the router's index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protocol.ids import BlockIdentity, block_identities
from router.kv_index import block_keys


class HashedBlocks(NamedTuple):
    """Keys of the leading full blocks of some tokens, and the identity of the last of them."""

    keys: list[int]
    last: BlockIdentity


def hash_blocks(parent: BlockIdentity, token_ids: Sequence[int], block_size: int) -> HashedBlocks:
    """Of the full blocks that follow `parent`."""
    identities = list(block_identities(parent, token_ids, block_size))
    return HashedBlocks(block_keys(b"".join(identities)), identities[-1] if identities else parent)
