"""Values out of range in requests and manifests are refused by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from protocol.errors import InvalidRequestError
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
from protocol.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams, check_sampling_params

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


VOCAB_SIZE = 100
MAX_LOGPROBS = 20


def check_parameters(**params) -> None:
    check_sampling_params(SamplingParams(**{"max_tokens": 16, **params}), VOCAB_SIZE, MAX_LOGPROBS)


BAD: dict[str, list[Any]] = {
    "temperature": [-0.1, 100.1, math.nan, math.inf],
    "top_p": [0.0, 1.01, -1.0, math.nan],
    "top_k": [-2],
    "min_p": [-0.01, 1.01, math.nan],
    "repetition_penalty": [0.0, -1.0, 101.0, math.nan],
    "presence_penalty": [2.1, -2.1, math.nan],
    "frequency_penalty": [2.1, -math.inf],
    "max_tokens": [0, -5],
    "min_tokens": [-1, 17],
    "seed": [2**63, -(2**63) - 1],
    "stop_token_ids": [[VOCAB_SIZE], [-1], [1] * (MAX_STOP_TOKEN_IDS + 1)],
    "logit_bias": [
        *({1: 100.5}, {1: math.nan}, {-1: 1.0}, {VOCAB_SIZE: 1.0}),
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0),
    ],
    "allowed_token_ids": [[], [VOCAB_SIZE]],
    "banned_token_sequences": [[[]], [[1], [2, VOCAB_SIZE]]],
    "logprobs": [MAX_LOGPROBS + 1, -1],
    "prompt_logprobs": [MAX_LOGPROBS + 1],
}


@pytest.mark.parametrize("name", BAD)
def test_out_of_range_is_refused_by_name(name):
    field = "bad_words" if name == "banned_token_sequences" else name
    for value in BAD[name]:
        with pytest.raises(InvalidRequestError, match=f"^{field}: ") as caught:
            check_parameters(**{name: value})
        assert caught.value.field == field


GOOD: dict[str, list[Any]] = {
    "temperature": [0.0, 100.0],
    "top_p": [1.0, 1e-9],
    "top_k": [-1, 0, 10**6],
    "min_p": [1.0],
    "repetition_penalty": [1e-3],
    "presence_penalty": [-2.0],
    "frequency_penalty": [2.0],
    "min_tokens": [16],
    "seed": [-(2**63), 2**63 - 1],
    "stop_token_ids": [[0, VOCAB_SIZE - 1]],
    "logit_bias": [{0: -100.0, VOCAB_SIZE - 1: 100.0}],
    "allowed_token_ids": [[5]],
    "banned_token_sequences": [[[1, 2], [3]]],
    "logprobs": [0],
    "prompt_logprobs": [MAX_LOGPROBS],
}


@pytest.mark.parametrize("name", GOOD)
def test_the_limits_themselves_are_accepted(name):
    check_parameters()
    for value in GOOD[name]:
        check_parameters(**{name: value})


def test_messages_name_the_limit():
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, 100\], got -1"):
        check_parameters(temperature=-1.0)
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, max_tokens=16\], got 20"):
        check_parameters(min_tokens=20)
    with pytest.raises(InvalidRequestError, match=r"must be in \[0, 20\], got 21"):
        check_parameters(logprobs=21)
