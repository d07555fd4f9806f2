"""A manifest that does not fit is refused by the name of its field."""

import msgspec
import pytest

from protocol.handoff import (
    MANIFEST_VERSION,
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
    block_ids=[4, 5, 9],
    pushed_blocks=3,
    first_token=7,
    first_token_position=37,
    sampling=SamplingState(seed=-5, num_output_tokens=0),
)


def check(manifest: HandoffManifest) -> None:
    check_manifest(
        manifest,
        incarnation="d",
        token_ids_digest=token_ids_digest(TOKENS),
        num_tokens=37,
        segments=[SEGMENT],
        block_ids=[4, 5, 9],
        seed=-5,
    )


def test_one_that_fits_passes():
    check(MANIFEST)
    check(msgspec.msgpack.decode(msgspec.msgpack.encode(MANIFEST), type=HandoffManifest))


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
        ("block_ids", {"block_ids": [4, 5]}),
        ("block_ids", {"block_ids": [5, 4, 9]}),
        ("first_token_position", {"first_token_position": 38}),
        ("sampling.seed", {"sampling": SamplingState(seed=5, num_output_tokens=0)}),
    ],
)
def test_each_field_that_differs_is_named(field, change):
    with pytest.raises(ManifestMismatchError, match=f"hand-off manifest: {field} is") as caught:
        check(msgspec.structs.replace(MANIFEST, **change))
    assert caught.value.field == field


def test_the_version_is_looked_at_first():
    changed = msgspec.structs.replace(MANIFEST, version=99, block_ids=[], decode_incarnation="x")
    with pytest.raises(ManifestMismatchError) as caught:
        check(changed)
    assert caught.value.field == "version"
