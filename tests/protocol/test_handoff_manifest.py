"""A manifest that does not fit is refused by its field's name."""

import msgspec
import pytest

from protocol.handoff import (
    MANIFEST_VERSION,
    DraftState,
    Extent,
    HandoffManifest,
    ManifestMismatchError,
    SamplingState,
    SegmentInfo,
    check_manifest,
)
from protocol.ids import token_ids_digest

TOKENS = list(range(37))
SEGMENT = SegmentInfo(name="target", dtype="bfloat16", shape=(8, 2, 16, 4, 64))
MANIFEST = HandoffManifest(
    request_id="r",
    lease_id="l",
    prefill_worker="prefill-0",
    prefill_incarnation="p",
    decode_incarnation="d",
    num_tokens=37,
    token_ids_digest=token_ids_digest(TOKENS),
    segments=[SEGMENT],
    state_position=40,
    extents=[Extent(0, [4, 5, 9])],
    pushed_blocks=3,
    first_token=7,
    first_token_position=37,
    sampling=SamplingState(seed=-5, num_output_tokens=0),
)


CARRIED = DraftState(kind="carried", method="eagle", num_tokens=37, feature=b"1234")


def check(manifest: HandoffManifest) -> None:
    known = msgspec.structs.replace(
        MANIFEST, first_token=manifest.first_token, draft=manifest.draft, reserve_s=manifest.reserve_s
    )
    check_manifest(manifest, known, vocab_size=300, feature_size=2)


def refused_field(manifest: HandoffManifest) -> str | None:
    try:
        check(manifest)
    except ManifestMismatchError as error:
        return error.field
    return None


def test_a_fitting_manifest_passes():
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(MANIFEST), type=HandoffManifest)
    assert received == MANIFEST
    assert refused_field(received) is None


@pytest.mark.parametrize("changes", [{}, {"feature": b""}, {"feature": b"12345678"}, {"method": "medusa"}])
def test_a_plausible_draft_passes(changes):
    carried = msgspec.structs.replace(CARRIED, **changes)
    assert refused_field(msgspec.structs.replace(MANIFEST, draft=carried)) is None


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("version", {"version": MANIFEST_VERSION + 1}),
        ("decode_incarnation", {"decode_incarnation": "earlier"}),
        ("num_tokens", {"num_tokens": 36}),
        ("token_ids_digest", {"token_ids_digest": token_ids_digest(TOKENS[::-1])}),
        ("segments", {"segments": []}),
        ("segments", {"segments": [msgspec.structs.replace(SEGMENT, dtype="float16")]}),
        ("segments", {"segments": [msgspec.structs.replace(SEGMENT, shape=(8, 2, 16, 8, 64))]}),
        ("segments", {"segments": [msgspec.structs.replace(SEGMENT, quantization="fp8")]}),
        ("segments", {"segments": [SEGMENT, msgspec.structs.replace(SEGMENT, name="draft")]}),
        ("state_position", {"state_position": 39}),
        ("extents", {"extents": [Extent(0, [4, 5])]}),
        ("extents", {"extents": [Extent(0, [5, 4, 9])]}),
        ("extents", {"extents": [Extent(1, [4, 5, 9])]}),
        ("first_token_position", {"first_token_position": 38}),
        ("sampling.seed", {"sampling": SamplingState(seed=5, num_output_tokens=0)}),
        ("sampling.num_output_tokens", {"sampling": SamplingState(seed=-5, num_output_tokens=1)}),
        ("first_token", {"first_token": 300}),
        ("reserve_s", {"reserve_s": float("inf")}),
        ("reserve_s", {"reserve_s": float("nan")}),
        ("reserve_s", {"reserve_s": -1.0}),
        ("draft.method", {"draft": DraftState(method="eagle")}),
        ("draft.num_tokens", {"draft": DraftState(num_tokens=1)}),
        ("draft.feature", {"draft": DraftState(feature=b"1234")}),
        ("draft.method", {"draft": msgspec.structs.replace(CARRIED, method="mind reading")}),
        ("draft.num_tokens", {"draft": msgspec.structs.replace(CARRIED, num_tokens=38)}),
        ("draft.feature", {"draft": msgspec.structs.replace(CARRIED, feature=b"123")}),
    ],
)
def test_each_field_that_differs_is_named(field, change):
    with pytest.raises(ManifestMismatchError, match=f"hand-off manifest: {field} is") as caught:
        check(msgspec.structs.replace(MANIFEST, **change))
    assert caught.value.field == field


def test_the_version_is_checked_first():
    changed = msgspec.structs.replace(MANIFEST, version=99, extents=[], decode_incarnation="x")
    assert refused_field(changed) == "version"
