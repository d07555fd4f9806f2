"""Types of message fields with bounds, which decoding checks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Id = Annotated[str, Meta(min_length=1, max_length=128)]
ShortText = Annotated[str, Meta(max_length=4096)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=2**24)]
BlockHash = Annotated[bytes, Meta(min_length=16, max_length=16)]
Count = Annotated[int, Meta(ge=0, lt=2**62)]
Seconds = Annotated[float, Meta(ge=0)]
