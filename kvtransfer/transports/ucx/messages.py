"""Messages that the two sides exchange once, right after the handshake."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvtransfer.framing.messages import Reason

MAX_METADATA_BYTES = 48 * 1024


class Introduction(msgspec.Struct, frozen=True, tag="ucx"):
    """Sender to receiver: the address of its pool, and the connection's word (see `words`) with its token.

    `metadata` is NIXL's own description of the agent: its UCX addresses and its memory's remote keys.
    """

    agent: Annotated[str, Meta(min_length=1, max_length=256)]
    metadata: Annotated[bytes, Meta(min_length=1, max_length=MAX_METADATA_BYTES)]
    address: Annotated[int, Meta(ge=0, lt=2**62)]
    kind: Literal["cpu", "cuda"]
    device_id: Annotated[int, Meta(ge=0, lt=1024)]
    word_address: Annotated[int, Meta(ge=0, lt=2**62)]
    token: Annotated[int, Meta(ge=1, lt=2**62)]


class UcxWelcome(msgspec.Struct, frozen=True, tag="ucx-welcome"):
    """Receiver to sender: it has read from the pool, or it can't (`refusal`)."""

    refusal: Reason = ""
