"""Identities of a prompt's blocks, as the workers compute them, and their keys in the router's index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from protocol.ids import BlockIdentity, block_identities
from router.workers.kv_index import block_keys


class HashedBlocks(NamedTuple):
    """The keys of the leading full blocks of some tokens, and the identity of the last of these blocks."""

    keys: list[int]
    last: BlockIdentity


def hash_blocks(parent: BlockIdentity, token_ids: Sequence[int], block_size: int) -> HashedBlocks:
    """Hash the full blocks that follow `parent`."""
    identities = list(block_identities(parent, token_ids, block_size))
    return HashedBlocks(block_keys(b"".join(identities)), identities[-1] if identities else parent)
