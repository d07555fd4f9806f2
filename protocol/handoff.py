"""The hand-off manifest: a prefill worker's description of a prompt's KV for the decode worker."""

from __future__ import annotations

import reprlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocol.speculation import CUSTOM, METHODS

MANIFEST_VERSION = 2

MAX_HANDOFF_S = 86400.0
"""Longest wait for a hand-off: a day. Other hosts' clocks cannot be checked more closely."""

ROW_QUANTIZATIONS = {"int8": "int8_row_scales", "fp8": "fp8_row_scales"}
"""`SegmentInfo.quantization` by `--kv-cache-dtype`. Each head's key or value of a token has a scale of its
own, of `SCALE_BYTES`, stored after the codes of all heads.
"""
SCALE_BYTES = 4

_ITEM_SIZES = (2, 4)
"""Bytes of a value in the dtypes that models run in."""


BlockPoolIndex = Annotated[int, Meta(ge=0, lt=16)]
BlockIds = Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=2**20)]


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one table of a sequence, in order. On the wire each table is a block pool of its own."""

    block_pool: BlockPoolIndex
    blocks: BlockIds


Extents = Annotated[list[Extent], Meta(max_length=16)]


MAX_SEGMENTS = 32
"""Most segments of a pool: one or two for each KV shape of layers, and for each further model."""


PAGED, WINDOWED, STATE = "paged", "windowed", "state"


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of the blocks of a block pool. `shape` is the shape within a single block.

    `kind` is the content. "paged": the KV of the number of tokens in `shape`. "windowed": KV of layers with a
    sliding window, so that blocks before the window are missing. "state": the state of recurrent layers at a
    grid point, with the grid and the bytes as `shape`; states take whole blocks after the blocks of the
    prompt's tokens. `dtype` is the dtype of the values; `quantization` says how they are stored, "none" if as
    `dtype`.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...], Meta(max_length=8)]
    kind: Annotated[str, Meta(max_length=32)] = PAGED
    block_pool: BlockPoolIndex = 0
    quantization: Annotated[str, Meta(max_length=32)] = "none"


class SamplingState(msgspec.Struct, frozen=True, kw_only=True):
    """The sampler's state. Noise is keyed by position, so no generator state is needed."""

    seed: int
    num_output_tokens: Annotated[int, Meta(ge=0)]


class DraftState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of the drafter of this `method`.

    `rebuild`: no state is sent; the decode worker derives it from the token ids, or works without. `carried`:
    the first `num_tokens` places of the blocks hold the draft's KV, and `feature` is the target's hidden
    state at the last of these places, in the model's dtype, for methods that draft from it.
    """

    kind: Literal["rebuild", "carried"] = "rebuild"
    method: Annotated[str, Meta(max_length=32)] = ""
    num_tokens: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    feature: Annotated[bytes, Meta(max_length=2**22)] = b""


REBUILD = DraftState()


class HandoffManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A description of a prompt's blocks in the decode worker's pool.

    `num_tokens` counts the tokens with KV; `first_token` is the token sampled after them, at absolute
    position `first_token_position` (equal to `num_tokens`). The decode worker computes the tokens between
    `state_position` and the first token again. `segments` and `pushed_blocks` (of all tables) are the prefill
    worker's, `extents` the decode worker's, for which the prefill worker waited `reserve_s`.
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
    state_position: Annotated[int, Meta(ge=0)]
    extents: Extents
    pushed_blocks: Annotated[int, Meta(ge=0)]
    first_token: Annotated[int, Meta(ge=0)]
    first_token_position: Annotated[int, Meta(ge=1)]
    sampling: SamplingState
    draft: DraftState = REBUILD
    reserve_s: Annotated[float, Meta(ge=0)] = 0.0


class ManifestMismatchError(Exception):
    """A manifest differs from what the decode worker reserved; `field` names the difference."""

    def __init__(self, field: str, expected: object, got: object) -> None:
        what = f"{field} is {reprlib.repr(got)}, expected {reprlib.repr(expected)}"
        super().__init__(f"hand-off manifest: {what}")
        self.field = field


def check_manifest(
    manifest: HandoffManifest, expected: HandoffManifest, vocab_size: int, feature_size: int
) -> None:
    """Raise `ManifestMismatchError` at the first field that differs from `expected`.

    The decode worker cannot know `first_token`, `draft` and `reserve_s`; `expected` has them from the
    manifest, and only their bounds are checked. `feature_size` counts the values in the hidden state that its
    drafter reads.
    """
    _check_equal(manifest, expected)
    if manifest.first_token >= vocab_size:
        raise ManifestMismatchError("first_token", f"< {vocab_size}", manifest.first_token)
    if not 0 <= manifest.reserve_s <= MAX_HANDOFF_S:
        raise ManifestMismatchError("reserve_s", f"at most {MAX_HANDOFF_S:g}", manifest.reserve_s)
    _check_draft(manifest.draft, manifest.num_tokens, feature_size)


def _check_equal(got: msgspec.Struct, expected: msgspec.Struct, prefix: str = "") -> None:
    for name in expected.__struct_fields__:
        field, theirs, ours = prefix + name, getattr(got, name), getattr(expected, name)
        if isinstance(ours, msgspec.Struct):
            _check_equal(theirs, ours, f"{field}.")
        elif theirs != ours:
            raise ManifestMismatchError(field, ours, theirs)


def _check_draft(draft: DraftState, num_tokens: int, feature_size: int) -> None:
    """Check a draft state's bounds. A different method or dtype is no mismatch: the draft is rebuilt."""
    if draft.kind == "rebuild":
        _check_equal(draft, REBUILD, "draft.")
        return
    known = (*METHODS, CUSTOM)
    if draft.method not in known:
        raise ManifestMismatchError("draft.method", f"one of {', '.join(known)}", draft.method)
    if draft.num_tokens > num_tokens:
        raise ManifestMismatchError("draft.num_tokens", f"at most {num_tokens}", draft.num_tokens)
    lengths = [0] + [feature_size * itemsize for itemsize in _ITEM_SIZES]
    if len(draft.feature) not in lengths:
        raise ManifestMismatchError("draft.feature", f"of {lengths} bytes", draft.feature)
