"""Addresses at which workers reach each other."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.ids import Id, ShortText


class TransferOffer(msgspec.Struct, frozen=True, kw_only=True):
    """One way to reach a worker's KV pool: the transport's name and what it needs to connect."""

    transport: Id
    host_id: Id
    address: ShortText
    same_host: bool = False
    """Whether only peers on this host can use it."""


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's address for other workers."""

    worker_id: Id
    incarnation: Id
    control: ShortText
    offers: Annotated[list[TransferOffer], Meta(max_length=16)] = []
