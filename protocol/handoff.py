"""The hand-off manifest: what a prefill worker tells a decode worker about a prompt's KV."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MANIFEST_VERSION = 1


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of a block: `shape` is that of a single block, without the block dimension."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[int, ...], Meta(max_length=8)]
    quantization: Annotated[str, Meta(max_length=32)] = "none"


class SamplingState(msgspec.Struct, frozen=True, kw_only=True):
    """What the sampler needs to go on. Noise is keyed by position, so there is no generator state."""

    seed: int
    num_output_tokens: Annotated[int, Meta(ge=0)]


class DraftState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of the drafter of this `method`.

    `rebuild`: none came along; the decode worker derives it from the token ids, or does without. `carried`:
    the leading `num_tokens` places of the blocks hold the draft's KV, and `feature` is the target's hidden
    state of the last of them, in the model's dtype, for methods that draft from it.
    """

    kind: Literal["rebuild", "carried"] = "rebuild"
    method: Annotated[str, Meta(max_length=32)] = ""
    num_tokens: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    feature: Annotated[bytes, Meta(max_length=2**22)] = b""


REBUILD = DraftState()


class HandoffManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a prompt's blocks in the decode worker's pool.

    `num_tokens` counts the tokens whose KV is described; `first_token` is the one sampled from them, at
    absolute position `first_token_position` (equal to `num_tokens`). `segments` and `pushed_blocks` are the
    prefill worker's, `block_ids` the decode worker's, for which the prefill worker waited `reserve_s`.
    """

    version: int = MANIFEST_VERSION
    request_id: str
    lease_id: str
    prefill_worker: str
    prefill_incarnation: str
    decode_incarnation: str
    num_tokens: Annotated[int, Meta(ge=1)]
    token_ids_digest: bytes
    segments: list[SegmentInfo]
    block_ids: list[int]
    pushed_blocks: Annotated[int, Meta(ge=0)]
    first_token: Annotated[int, Meta(ge=0)]
    first_token_position: Annotated[int, Meta(ge=1)]
    sampling: SamplingState
    draft: DraftState = REBUILD
    checksum: bytes | None = None
    reserve_s: Annotated[float, Meta(ge=0)] = 0.0


class ManifestMismatchError(Exception):
    """A manifest does not fit what the decode worker reserved; `field` says where."""

    def __init__(self, field: str, expected: object, got: object) -> None:
        super().__init__(f"hand-off manifest: {field} is {got!r}, expected {expected!r}")
        self.field = field


def check_manifest(
    manifest: HandoffManifest,
    *,
    incarnation: str,
    token_ids_digest: bytes,
    num_tokens: int,
    segments: list[SegmentInfo],
    block_ids: list[int],
    seed: int,
) -> None:
    """Raise `ManifestMismatchError` at the first field that differs from what the receiver expects."""
    expected: list[tuple[str, object, object]] = [
        ("version", MANIFEST_VERSION, manifest.version),
        ("decode_incarnation", incarnation, manifest.decode_incarnation),
        ("num_tokens", num_tokens, manifest.num_tokens),
        ("token_ids_digest", token_ids_digest, manifest.token_ids_digest),
        ("segments", segments, manifest.segments),
        ("block_ids", block_ids, manifest.block_ids),
        ("first_token_position", num_tokens, manifest.first_token_position),
        ("sampling.seed", seed, manifest.sampling.seed),
    ]
    for field, want, got in expected:
        if want != got:
            raise ManifestMismatchError(field, want, got)
