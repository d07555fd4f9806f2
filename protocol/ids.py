"""Identifiers: requests, workers and their incarnations, blocks."""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterator, Sequence

BlockIdentity = bytes
"""Chained 128-bit identity of a full block of committed tokens."""

_TOKEN_BYTES = 4


def new_incarnation() -> str:
    """An id that no earlier start of any process has had."""
    return secrets.token_hex(8)


def peer_identity(worker_id: str, incarnation: str) -> str:
    """By which a worker that asks another one for something is known there."""
    return f"{worker_id}:{incarnation}"


def new_request_id(router: str) -> str:
    """Of a request of the router with this incarnation: workers tell by the id whose it is."""
    return f"{router}.{secrets.token_hex(12)}"


def router_of(request_id: str) -> str:
    """The incarnation of the router that a request belongs to."""
    return request_id.partition(".")[0]


def root_identity(model: str, kv_format: str, cache_salt: str = "", adapter: str = "") -> BlockIdentity:
    """The parent identity of a sequence's first block.

    It binds the chain to the model, to the format of its KV, to the tenant's salt and to the adapter's
    digest, so that blocks which must not be shared never collide.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (model, kv_format, cache_salt, *([adapter] if adapter else [])):
        raw = part.encode()
        digest.update(struct.pack("<I", len(raw)))
        digest.update(raw)
    return digest.digest()


def child_identity(parent: BlockIdentity, token_ids: Sequence[int]) -> BlockIdentity:
    """Identity of the block that holds `token_ids` and follows `parent`."""
    return _child(parent, _packed(token_ids))


def block_identities(
    root: BlockIdentity, token_ids: Sequence[int], block_size: int
) -> Iterator[BlockIdentity]:
    """Identities of the full blocks of `token_ids`, in order; a partial last block has none."""
    packed = _packed(token_ids)
    identity, width = root, block_size * _TOKEN_BYTES
    for end in range(width, len(packed) + 1, width):
        identity = _child(identity, packed[end - width : end])
        yield identity


def state_identities(block: BlockIdentity, count: int) -> list[BlockIdentity]:
    """Of the `count` blocks with the state of recurrent layers behind a block."""
    return [child_identity(b"state" + block, [index]) for index in range(count)]


def table_identity(block: BlockIdentity, table: int) -> BlockIdentity:
    """Of what lies in blocks of this table of the same tokens, apart from that of the first one."""
    return child_identity(b"table" + block, [table]) if table else block


def token_ids_digest(token_ids: Sequence[int]) -> bytes:
    """128-bit digest of a token list, to compare two processes' view of it."""
    return child_identity(b"", token_ids)


def _packed(token_ids: Sequence[int]) -> bytes:
    """Little-endian unsigned integers of `_TOKEN_BYTES` each."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _child(parent: BlockIdentity, packed: bytes) -> BlockIdentity:
    return hashlib.blake2b(parent + packed, digest_size=16).digest()
