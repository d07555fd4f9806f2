"""KV events in vLLM's format, as other routers read them.

A batch is `[timestamp, [event, ...], rank]`. An event is an array that begins with its type's name, or,
since vLLM 0.26, a map with a "type". Hashes are the low 64 bits of our identities. Consumers that hash
tokens themselves use `token_ids`; events about lower tiers have none.
"""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStoredMap(msgspec.Struct, frozen=True, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemovedMap(msgspec.Struct, frozen=True, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class AllBlocksClearedMap(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    pass
