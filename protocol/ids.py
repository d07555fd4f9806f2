"""Ids of requests, processes and blocks, addresses of workers, and bounded types of message fields."""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

Id = Annotated[str, Meta(min_length=1, max_length=128)]
ShortText = Annotated[str, Meta(max_length=4096)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=2**24)]
BlockHash = Annotated[bytes, Meta(min_length=16, max_length=16)]
Count = Annotated[int, Meta(ge=0, lt=2**62)]
Seconds = Annotated[float, Meta(ge=0)]


BlockIdentity = bytes
"""Chained 128-bit identity of a full block of committed tokens."""

_TOKEN_BYTES = 4


def new_incarnation() -> str:
    """Return an id that no process has had before."""
    return secrets.token_hex(8)


def peer_identity(worker_id: str, incarnation: str) -> str:
    """Return the identity that a worker uses in requests to another worker."""
    return f"{worker_id}:{incarnation}"


def new_request_id(router: str) -> str:
    """Return a new request id, from which workers know the router with this incarnation."""
    return f"{router}.{secrets.token_hex(12)}"


def router_of(request_id: str) -> str:
    """Return the incarnation of the router that a request belongs to."""
    return request_id.partition(".")[0]


def root_identity(model: str, kv_format: str, cache_salt: str = "", adapter: str = "") -> BlockIdentity:
    """Return the parent identity of a sequence's first block.

    The chain depends on the model, the format of its KV, the tenant's salt and the adapter's digest, so that
    blocks that must not be shared never collide.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in (model, kv_format, cache_salt, *([adapter] if adapter else [])):
        raw = part.encode()
        digest.update(struct.pack("<I", len(raw)))
        digest.update(raw)
    return digest.digest()


def child_identity(parent: BlockIdentity, token_ids: Sequence[int]) -> BlockIdentity:
    """Return the identity of the block that holds `token_ids` and follows `parent`."""
    return _child(parent, _packed(token_ids))


def block_identities(
    root: BlockIdentity, token_ids: Sequence[int], block_size: int
) -> Iterator[BlockIdentity]:
    """Yield the identities of the full blocks of `token_ids`, in order. A partial last block has none."""
    packed = _packed(token_ids)
    identity, width = root, block_size * _TOKEN_BYTES
    for end in range(width, len(packed) + 1, width):
        identity = _child(identity, packed[end - width : end])
        yield identity


def state_identities(block: BlockIdentity, count: int) -> list[BlockIdentity]:
    """Return the identities of the `count` blocks with the state of recurrent layers after `block`."""
    return [child_identity(b"state" + block, [index]) for index in range(count)]


def table_identity(block: BlockIdentity, table: int) -> BlockIdentity:
    """Return the identity of the block with the same tokens in another table."""
    return child_identity(b"table" + block, [table]) if table else block


def token_ids_digest(token_ids: Sequence[int]) -> bytes:
    """Return a 128-bit digest of a token list, to compare two processes' copies of it."""
    return child_identity(b"", token_ids)


def _packed(token_ids: Sequence[int]) -> bytes:
    """Pack as little-endian unsigned integers of `_TOKEN_BYTES` each."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _child(parent: BlockIdentity, packed: bytes) -> BlockIdentity:
    return hashlib.blake2b(parent + packed, digest_size=16).digest()


class TransferOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to reach a worker's KV pool: the transport's name and what it needs to connect."""

    transport: Id
    host_id: Id
    address: ShortText
    same_host: bool = False
    """Whether only peers on the worker's host can use it."""


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's address for other workers."""

    worker_id: Id
    incarnation: Id
    control: ShortText
    offers: Annotated[list[TransferOffer], Meta(max_length=16)] = []
