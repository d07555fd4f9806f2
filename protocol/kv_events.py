"""Workers' reports of the blocks in their prefix caches, and the options for publishing them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.errors import ConfigError
from protocol.fields import FieldError, json_object, to_struct
from protocol.ids import BlockIdentity, root_identity

IDENTITY_BYTES = 16
MAX_BLOCKS_PER_BATCH = 8192
"""Most blocks in a batch: a router handles this many in a few milliseconds."""

REPLAY_BATCHES = 10_000
"""Number of batches that a worker keeps for replays."""

EventKind = Literal["stored", "removed", "cleared"]


class Medium(enum.IntEnum):
    """The tiers of blocks, by vLLM's names: the pool on any device, host memory, disk."""

    GPU = 0
    CPU = 1
    STORAGE = 2


class CacheFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that a worker's block identities depend on, in addition to tokens, salt and adapter.

    With `has_states` the worker reports only blocks after which it keeps a state of recurrent layers; it has
    all blocks before such a block. With a `window`, layers attend only to that many latest tokens.
    """

    model: Annotated[str, Meta(max_length=4096)]
    kv_format: Annotated[str, Meta(max_length=4096)]
    block_size: Annotated[int, Meta(ge=1, le=2**16)]
    has_states: bool = False
    window: Annotated[int, Meta(ge=0, lt=2**31)] = 0

    def root(self, cache_salt: str = "", adapter: str = "") -> BlockIdentity:
        return root_identity(self.model, self.kv_format, cache_salt, adapter)


class KvChange(msgspec.Struct, frozen=True, array_like=True):
    """A change to several blocks, given by their concatenated identities. "cleared" has none."""

    kind: EventKind
    medium: Medium = Medium.GPU
    identities: Annotated[bytes, Meta(max_length=IDENTITY_BYTES * MAX_BLOCKS_PER_BATCH)] = b""


class KvEventsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `--kv-events-config`: where and how workers publish to other consumers.

    A worker binds `endpoint` and `replay_endpoint`, with its index among all workers added to the port;
    workers of the first role come first. Port 0 picks a free one. `topic` is `kv@<worker>@<model>` by
    default.
    """

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str | None = None
    encoding: Literal["array", "map"] = "array"
    buffer_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = REPLAY_BATCHES
    hwm: Annotated[int, Meta(ge=1, le=10_000_000)] = 100_000


def parse_kv_events_config(value: object, flag: str = "--kv-events-config") -> KvEventsConfig:
    """Parse JSON text or a mapping. Raises `ConfigError` that names `flag`, the field and its limit."""
    if isinstance(value, KvEventsConfig):
        return value
    fields = json_object(value, flag, '{"endpoint": "tcp://*:5557"}', "an object")
    try:
        config = to_struct(fields, KvEventsConfig)
        for name in ("endpoint", "replay_endpoint"):
            _check_endpoint(name, getattr(config, name))
    except FieldError as error:
        raise ConfigError(f"{flag}: {error}") from error
    return config


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def endpoint_at(endpoint: str, place: int) -> str:
    """Return the endpoint of the worker with this index."""
    port = port_of(endpoint)
    return f"{endpoint.rpartition(':')[0]}:{port + place if port else 0}"


def _check_endpoint(name: str, endpoint: str | None) -> None:
    if endpoint is None:
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not endpoint.startswith("tcp://") or not host or not port.isascii() or not port.isdigit():
        raise FieldError(name, f"must be like tcp://*:5557, got {endpoint!r}")
    if int(port) > 65535:
        raise FieldError(name, f"the port must be at most 65535, got {port}")


TILE = 64
"""Tokens in a tile: kernels read keys in whole tiles, also some keys before the window."""


@dataclass(frozen=True)
class Window:
    """A sliding window of `size` tokens, including the row's own token."""

    size: int
    block_size: int

    def first_place(self, position: int) -> int:
        """Return the index of the first block that rows from `position` on read."""
        return max(position + 1 - self.size, 0) // TILE * TILE // self.block_size

    def span(self, num_rows: int = 0) -> int:
        """Return the tokens read for a window and `num_rows` more rows, rounded up to whole blocks."""
        return (-(-(self.size + TILE + num_rows) // self.block_size) + 1) * self.block_size
