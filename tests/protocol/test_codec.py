"""Messages survive encoding and decoding, and everything else is refused."""

from typing import Any

import msgspec
import pytest
from hypothesis import strategies as st

from protocol import codec
from protocol.errors import ProtocolError
from protocol.handoff import Extent
from protocol.ids import PeerAddress, TransferOffer
from protocol.outputs import RequestTiming, TokenLogprobs, TokenOutput, logprobs_pages
from protocol.requests import EngineRequest
from protocol.router_to_worker import Abort, Generate, Peers, Redirect, Registered
from protocol.sampling import SamplingParams
from protocol.worker_to_router import HandoverFailed, StepOutput, WorkerState
from protocol.worker_to_worker import (
    Fetch,
    FetchRefused,
    Handoff,
    HandoffAck,
    Release,
    Reserve,
    Reserved,
    ReserveRefused,
    Stale,
)
from tests.fuzzing import altered, damaged, fuzz
from tests.protocol.test_handoff_manifest import MANIFEST, SEGMENT
from tests.router.placed import registration

SAMPLING = SamplingParams(
    max_tokens=7,
    seed=-(2**63),
    temperature=0.5,
    logit_bias={3: -1.5, 151_935: 100.0},
    banned_token_sequences=[[1, 2], [3]],
    allowed_token_ids=[1],
    stop_token_ids=[9],
    logprobs=0,
)
REQUEST = EngineRequest(
    request_id="r1",
    prompt_token_ids=[0, 1, 2**31 - 1],
    sampling=SAMPLING,
    output_token_ids=[4],
    cache_salt="é",
)
ADDRESS = PeerAddress(
    worker_id="decode-0",
    incarnation="abc",
    control="tcp://127.0.0.1:1",
    offers=[TransferOffer(transport="shm", host_id="h", address="@x")],
)
STATE = WorkerState(worker_id="decode-0", incarnation="abc", role="decode", counters={"steps": 1.5})
OUTPUT = TokenOutput(
    request_id="r1",
    token_ids=[1, 2],
    finish_reason="stop",
    stop_token_id=2,
    logprobs=[TokenLogprobs(-0.5, 1, [1, 2], [-0.5, -2.0])],
    prompt_logprobs=logprobs_pages([None, TokenLogprobs(-9999.0, 300)]),
    cached_tokens=16,
    timing=RequestTiming(queue_s=0.1),
)
LEASE: dict[str, Any] = {"request_id": "r1", "lease_id": "l1", "incarnation": "abc"}
PREFILL: dict[str, Any] = {"prefill_worker": "p0", "prefill_incarnation": "p"}
FAILED: dict[str, Any] = {"request_id": "r1", "decode_incarnation": "abc", "manifest_sent": True}
BY_CHANNEL: dict[Any, list[Any]] = {
    codec.router_to_worker: [
        Registered(incarnation="abc", router="r"),
        Generate(incarnation="abc", request=REQUEST, decode=ADDRESS),
        Generate(incarnation="abc", request=REQUEST),
        Abort(request_ids=["r1", "r2"]),
        Redirect(incarnation="abc", request_id="r1", decode=ADDRESS),
        Redirect(incarnation="abc", request_id="r1"),
        Peers(peers=[ADDRESS]),
    ],
    codec.worker_to_router: [
        STATE,
        registration("decode-0", "abc", state=STATE, start_up={"attention": "cpu"}),
        StepOutput(worker_id="decode-0", incarnation="abc", outputs=[OUTPUT]),
        HandoverFailed(
            worker_id="p0", incarnation="p", **FAILED, error_kind="transfer", reason="the link broke"
        ),
    ],
    codec.peer_request: [
        Reserve(incarnation="abc", request=REQUEST, **PREFILL, segments=[SEGMENT], ttl_s=3.0),
        Handoff(manifest=MANIFEST),
        Release(incarnation="abc", lease_id="l1", request_id="r1"),
        Fetch(**LEASE, first_block=2, identities=[b"i" * 16], receiver=ADDRESS),
    ],
    codec.peer_reply: [
        Reserved(**LEASE, block_size=16, extents=[Extent(0, [1])], covered=0),
        ReserveRefused(request_id="r1", error_kind="overloaded", reason="no room"),
        HandoffAck(request_id="r1", lease_id="l1", error="no", field="segments"),
        FetchRefused(request_id="r1", lease_id="l1", reason="no"),
        Stale(request_id="r1", incarnation="abc"),
    ],
}
MESSAGES = [(channel, message) for channel, messages in BY_CHANNEL.items() for message in messages]
CHANNELS = list(BY_CHANNEL)
NAMES = [type(message).__name__ for _, message in MESSAGES]


@pytest.mark.parametrize(("channel", "message"), MESSAGES, ids=NAMES)
def test_only_the_whole_message_is_decoded_and_only_by_its_channel(channel, message):
    raw = codec.encode(message)
    assert channel.decode(raw) == channel.decode(memoryview(raw)) == message
    refusing = [(other, raw) for other in CHANNELS if other is not channel]
    for other, part in (*refusing, *((channel, raw[:end]) for end in range(len(raw)))):
        with pytest.raises(ProtocolError):
            other.decode(part)


def with_field(message: msgspec.Struct, path: str, value: object) -> bytes:
    """Return the message's bytes with the field at a dotted path replaced by any value."""
    tree = msgspec.msgpack.decode(codec.encode(message))
    *parents, last = path.split(".")
    node = tree
    for name in parents:
        node = node[name]
    node[last] = value
    return msgspec.msgpack.encode(tree)


_MESSAGE = dict(zip(NAMES, (message for _, message in MESSAGES), strict=True))
GENERATE = MESSAGES[1][1]
OUT_OF_BOUNDS = [
    (codec.router_to_worker, GENERATE, "incarnation", ""),
    (codec.router_to_worker, GENERATE, "incarnation", "x" * 129),
    (codec.router_to_worker, GENERATE, "request.request_id", 5),
    (codec.router_to_worker, GENERATE, "request.prompt_token_ids", [-1]),
    (codec.router_to_worker, GENERATE, "request.prompt_token_ids", [2**31]),
    (codec.router_to_worker, GENERATE, "request.prompt_token_ids", [1.5]),
    (codec.router_to_worker, GENERATE, "request.prompt_token_ids", "text"),
    (codec.router_to_worker, GENERATE, "request.priority", 2**31),
    (codec.router_to_worker, GENERATE, "request.timeout_s", -1.0),
    (codec.router_to_worker, GENERATE, "request.cache_salt", "x" * 257),
    (codec.router_to_worker, GENERATE, "request.sampling.temperature", "hot"),
    (codec.router_to_worker, GENERATE, "request.sampling.max_tokens", None),
    (codec.router_to_worker, GENERATE, "decode.offers", [{"transport": "shm"}]),
    (codec.router_to_worker, _MESSAGE["Abort"], "request_ids", ["x"] * (2**16 + 1)),
    (codec.worker_to_router, STATE, "role", "x" * 65),
    (codec.worker_to_router, STATE, "free_blocks", -1),
    (
        codec.worker_to_router,
        _MESSAGE["StepOutput"],
        "outputs",
        [{"request_id": "r", "token_ids": [1], "finish_reason": "x"}],
    ),
    (codec.peer_request, _MESSAGE["Handoff"], "manifest.num_tokens", 0),
    (codec.peer_request, _MESSAGE["Handoff"], "manifest.first_token", -1),
    (codec.peer_request, _MESSAGE["Reserve"], "ttl_s", 1e9),
    (codec.peer_request, _MESSAGE["Reserve"], "ttl_s", float("nan")),
    (codec.peer_reply, _MESSAGE["Reserved"], "extents", [[0, [2**31]]]),
    (codec.peer_reply, _MESSAGE["Reserved"], "extents", [[16, [1]]]),
    (codec.peer_reply, _MESSAGE["Reserved"], "covered", -1),
]


@pytest.mark.parametrize(
    ("channel", "message", "path", "value"), OUT_OF_BOUNDS, ids=[c[2] for c in OUT_OF_BOUNDS]
)
def test_a_field_out_of_bounds_is_refused_and_named(channel, message, path, value):
    with pytest.raises(ProtocolError, match=path.rsplit(".", 1)[-1]):
        channel.decode(with_field(message, path, value))


def test_unknown_fields_are_skipped_for_other_versions():
    message = Registered(incarnation="abc", router="r")
    assert codec.router_to_worker.decode(with_field(message, "later", [1, {"x": 2}])) == message


def test_endless_nesting_is_refused():
    raw = codec.encode(Registered(incarnation="abc", router="r"))
    nested = b"\x83" + raw[1:] + b"\xa5later" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(ProtocolError):
        codec.router_to_worker.decode(nested)


def test_a_message_over_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(ProtocolError, match="exceeds the limit of 10"):
        codec.router_to_worker.decode(codec.encode(Abort(request_ids=["r" * 20])))


def test_fuzz_the_channels():
    whole = {channel: list(map(codec.encode, messages)) for channel, messages in BY_CHANNEL.items()}

    def check(example):
        channel, raw = example
        try:
            message = channel.decode(raw)
        except ProtocolError:
            return
        assert channel.decode(codec.encode(message)) == message

    def any_bytes(channel):
        known = whole[channel]
        return st.tuples(st.just(channel), damaged(known) | altered(known) | st.binary(max_size=200))

    fuzz(check, st.sampled_from(CHANNELS).flatmap(any_bytes), examples=500)
