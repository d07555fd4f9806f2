"""The lossless code of bf16 KV, and coded pieces: chosen where they are faster, refused when damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.blocks import codec
from kvtransfer.blocks.codec import SLICE_BYTES, Codec, slices
from kvtransfer.interface import Completed
from kvtransfer.messages import GOOD, SPOILED, Ack, Piece, PieceRefusal
from kvtransfer.streams import coding
from kvtransfer.streams.coding import MEASURED_BYTES, WireCoding
from kvtransfer.streams.pieces import QueuedPiece
from kvtransfer.transports.registry import TransportOptions
from tests.kvtransfer.test_leases import runs
from tests.kvtransfer.test_unlike_pools import BLOCK_SIZE, NUM_BLOCKS, UNTOUCHED, pool, tokens_of, transfer
from tests.kvtransfer.transfer_sides import RawPeer, ReceiverEnd, SenderEnd, moved

Raw = npt.NDArray[np.uint8]
GUARD = 64


def bf16(values: npt.NDArray[np.float32]) -> Raw:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def normal(count: int, spread: float = 1.0) -> Raw:
    """Return values whose channels differ in size by powers of `spread`, as those of keys do."""
    rng = np.random.default_rng(count)
    return bf16((rng.standard_normal(count) * spread ** (np.arange(count) % 4)).astype(np.float32))


CASES = {
    "all patterns in order": np.arange(2**16, dtype=np.uint16).view(np.uint8),
    "all patterns, mixed": np.random.default_rng(0).permutation(2**16).astype(np.uint16).view(np.uint8),
    "random bytes": np.random.default_rng(1).integers(0, 256, 20_001, np.uint8),
    "values": normal(5000),
    "channels of different size": normal(5000, 8.0),
    "zeros": np.zeros(4096, np.uint8),
    "zeros after values": np.concatenate([normal(1000), np.zeros(3000, np.uint8)]),
    "each exponent": np.repeat(np.arange(256, dtype=np.uint16) << 7, 256).view(np.uint8),
}


def encoded(source: Raw, block_bytes: int, blocks: npt.NDArray[np.int64], first: int, last: int) -> Raw:
    codec = Codec(block_bytes)
    coded = codec.encode(source.data, blocks, first, last)
    return np.frombuffer(coded, np.uint8).copy()


def decoded(
    coded: Raw, block_bytes: int, blocks: npt.NDArray[np.int64], first: int, last: int, room: int
) -> tuple[bool, Raw]:
    """Decode into `room` bytes, and check that nothing around them is touched."""
    codec = Codec(block_bytes)
    codec.staging[: len(coded)] = coded.data
    target = np.full(room + 2 * GUARD, 0xA5, np.uint8)
    inside = target.data[GUARD : GUARD + room]
    good = codec.decode(len(coded), inside, blocks, first, last)
    assert (target[:GUARD] == 0xA5).all() and (target[GUARD + room :] == 0xA5).all()
    return good, target[GUARD : GUARD + room]


@pytest.mark.parametrize("case", CASES)
def test_every_value_comes_back(case: str) -> None:
    source = CASES[case]
    only = np.zeros(1, np.int64)
    coded = encoded(source, len(source), only, 0, len(source))
    good, back = decoded(coded, len(source), only, 0, len(source), len(source))
    assert good and np.array_equal(back, source)
    assert len(coded) <= len(source)
    if case in ("values", "zeros"):
        assert len(coded) < 0.72 * len(source)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([1, 2, 511, 512, 514, 1536, 4000]),
    st.permutations(range(6)),
    st.integers(0, 3),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_exactly_the_range_comes_back(
    block_bytes: int, order: list[int], offset: int, first: float, last: float
) -> None:
    """Blocks of any size lie anywhere, in any order; only the range of bytes is read and written."""
    source = normal(6 * 4000)[offset : offset + 6 * block_bytes]
    total = 4 * block_bytes
    begin, end = sorted((int(first * total), int(last * total)))
    sources, targets = np.array(order[:4], np.int64), np.array(order[::-1][:4], np.int64)
    coded = encoded(source, block_bytes, sources, begin, end)
    good, back = decoded(coded, block_bytes, targets, begin, end, 6 * block_bytes)
    expected = np.full((6, block_bytes), 0xA5, np.uint8)
    expected[targets] = source.reshape(6, block_bytes)[sources]
    flat = expected[targets].ravel()
    flat[:begin] = flat[end:] = 0xA5
    expected[targets] = flat.reshape(4, block_bytes)
    assert good and np.array_equal(back, expected.ravel())


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["values", "random bytes", "zeros after values"]),
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=8),
    st.integers(-600, 600),
)
def test_damaged_bytes_are_told_or_change_only_their_range(
    case: str, changes: list[tuple[int, int]], longer: int
) -> None:
    """Decoding either fails or writes other values; it never leaves its buffers (see `decoded`)."""
    source, only = CASES[case], np.zeros(1, np.int64)
    coded = encoded(source, len(source), only, 0, len(source))
    for place, value in changes:
        coded[place % len(coded)] = value
    size = int(np.clip(len(coded) + longer, 0, len(source)))
    good, _ = decoded(np.resize(coded, size), len(source), only, 0, len(source), len(source))
    if not changes and longer and size not in (len(coded), len(source)):
        assert not good


def test_slices_cover_a_piece_and_fit_the_staging() -> None:
    nbytes = 2 * SLICE_BYTES + 5
    assert list(slices(nbytes)) == [
        (0, SLICE_BYTES),
        (SLICE_BYTES, 2 * SLICE_BYTES),
        (2 * SLICE_BYTES, nbytes),
    ]
    noise = np.random.default_rng(2).integers(0, 256, SLICE_BYTES, np.uint8)
    assert len(encoded(noise, 512, np.arange(SLICE_BYTES // 512), 0, SLICE_BYTES)) == SLICE_BYTES


Closing = Callable[[Any], Any]
OFF = TransportOptions(wire_codec="off")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code every piece, in several slices."""
    monkeypatch.setattr(WireCoding, "chooses", lambda *_: True)
    monkeypatch.setattr(codec, "SLICE_BYTES", 5120)


@pytest.mark.parametrize("checksum", ["off", "sampled", "full"])
@pytest.mark.parametrize(("ours", "device"), [("bfloat16", None), ("float32", None), ("bfloat16", "cpu")])
def test_coded_blocks_arrive_unchanged(
    closing: Closing, always: None, checksum: str, ours: str, device: str | None
) -> None:
    num_tokens = 5 * BLOCK_SIZE + 3
    sent, arrived, sender = transfer(
        closing, "tcp", "bfloat16", ours, num_tokens, 1, devices=(device, device), checksum=checksum
    )
    assert torch.equal(arrived[BLOCK_SIZE:num_tokens], sent[BLOCK_SIZE:num_tokens])
    plain = moved(sender.sender.pairs, "tcp", "kv_transfer_uncoded_bytes_total")
    assert plain == 5 * sender.pool.block_bytes
    assert 0.5 * plain < moved(sender.sender.pairs, "tcp") < 0.72 * plain


@pytest.mark.parametrize(
    ("theirs", "options"), [("float32", TransportOptions()), ("bfloat16", OFF)], ids=["fp32", "off"]
)
def test_nothing_is_coded_without_bf16_or_when_off(
    closing: Closing, always: None, theirs: str, options: TransportOptions
) -> None:
    _, _, sender = transfer(closing, "tcp", theirs, "bfloat16", 75, 0, options)
    plain = moved(sender.sender.pairs, "tcp", "kv_transfer_uncoded_bytes_total")
    assert moved(sender.sender.pairs, "tcp") == plain == 5 * sender.pool.block_bytes


class Ends:
    """A sender of bf16 and its receiver, whose lease "lease" has room for `count` blocks."""

    def __init__(
        self, closing: Closing, count: int = NUM_BLOCKS, wire: TransportOptions = TransportOptions()
    ):
        self.count = count
        source_pool, self.source = pool("bfloat16")
        target_pool, self.target = pool("bfloat16")
        self.source.copy_(torch.randn(self.source.shape, generator=torch.Generator().manual_seed(3)))
        self.sender = closing(SenderEnd(["tcp"], source_pool))
        self.receiver = closing(ReceiverEnd(["tcp"], target_pool, wire))
        self.receiver.open("lease", range(count))

    def push(self) -> None:
        self.sender.push(self.receiver.peer, "lease", range(self.count))

    def check(self) -> None:
        assert isinstance(self.sender.wait_lease("lease"), Completed)
        blocks = list(range(self.count))
        assert torch.equal(tokens_of(self.source, blocks), tokens_of(self.target, blocks))


def test_a_receiver_that_knows_no_code_gets_plain_pieces(closing: Closing, always: None) -> None:
    """An older peer's answer has no codec, as one with `off`."""
    ends = Ends(closing, wire=OFF)
    ends.push()
    ends.check()
    nbytes = moved(ends.sender.sender.pairs, "tcp")
    assert nbytes == moved(ends.sender.sender.pairs, "tcp", "kv_transfer_uncoded_bytes_total")


def test_a_piece_that_does_not_decode_is_sent_again_plain(
    closing: Closing, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Codec.decode

    def damaged(self: Codec, *arguments: Any) -> bool:
        self.staging[0] = 255
        return decode(self, *arguments)

    monkeypatch.setattr(Codec, "decode", damaged)
    ends = Ends(closing)
    ends.push()
    ends.check()
    for side in (ends.sender.sender, ends.receiver.receiver):
        assert side.counters()["failures_checksum_mismatch"] == 1
    assert ends.sender.sender.counters()["connections_made"] == 1


def test_an_abort_ends_a_coded_piece_before_its_next_slice(
    closing: Closing, always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, began, go_on = Codec.encode, threading.Event(), threading.Event()

    def slow(self: Codec, *arguments: Any) -> memoryview:
        coded = encode(self, *arguments)
        if arguments[2] > 0:
            began.set()
            assert go_on.wait(20)
        return coded

    monkeypatch.setattr(Codec, "encode", slow)
    ends = Ends(closing, NUM_BLOCKS - 1)
    ends.push()
    assert began.wait(20)
    aborting = threading.Thread(target=ends.sender.sender.abort, args=("lease",))
    aborting.start()
    aborting.join(0.05)
    assert aborting.is_alive(), "blocks are still read"
    go_on.set()
    aborting.join(20)
    ends.source.fill_(9.0)
    ends.receiver.open("next", [NUM_BLOCKS - 1])
    ends.sender.push(ends.receiver.peer, "next", [0])
    assert isinstance(ends.sender.wait_lease("next"), Completed)
    assert (ends.target[NUM_BLOCKS - 1] == 9.0).all()
    assert (ends.target[:-1] != 9.0).all() and (ends.target[-2] == UNTOUCHED).all()
    assert ends.sender.sender.counters()["connections_made"] == 1


@pytest.mark.parametrize(
    ("payload", "ack"),
    [
        (b"\x64\0\0\0" + b"\x79" * 100 + GOOD, Ack(1, PieceRefusal.CHECKSUM_MISMATCH, again=True)),
        (bytes(4), None),
        ((3073).to_bytes(4, "little"), None),
        (b"\x64\0\0\0" + b"\x79" * 100 + b"more", None),
        (SPOILED, Ack(1, "given up by the sender")),
    ],
    ids=["no code", "empty slice", "long slice", "bad trailer", "given up"],
)
def test_a_peers_bad_slices(closing: Closing, payload: bytes, ack: Ack | None) -> None:
    source, _ = pool("bfloat16")
    target, values = pool("bfloat16")
    receiver = closing(ReceiverEnd(["tcp"], target))
    receiver.open("lease", [1])
    raw = closing(RawPeer.connect(receiver, "tcp", source))
    raw.send(Piece(1, "lease", 0, 1, runs((5, 0, 1)), True, coded=True))
    raw.send_bytes(payload)
    if ack is None:
        assert raw.is_closed_by_peer()
    else:
        assert raw.ack() == ack
    assert (values[[0, *range(2, NUM_BLOCKS)]] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("plain_s", "coded_s", "share"),
    [(0.016, 0.012, 1.0), (0.016, 0.017, 0.0), (0.0004, 0.0001, 0.0)],
    ids=["a slow wire", "measured slower", "a fast wire"],
)
def test_the_choice(monkeypatch: pytest.MonkeyPatch, plain_s: float, coded_s: float, share: float) -> None:
    """Encoding takes 0.5 s/GB and leaves 0.7; a piece has 1 MiB."""

    def measure(coding: WireCoding, *_: object) -> None:
        coding._ratio, coding._encoding_s = 0.7, 0.5e-9

    monkeypatch.setattr(WireCoding, "_try", measure)
    now = 0.0
    monkeypatch.setattr(coding.time, "monotonic", lambda: now)
    choice, chosen = WireCoding(MEASURED_BYTES), []
    for _ in range(100):
        piece = QueuedPiece("lease", 0, [np.zeros((2, 1), np.int64)], 1, False)
        piece.coded, piece.sent_at = choice.chooses(memoryview(b""), np.zeros(1, np.int64)), now
        now += coded_s if piece.coded else plain_s
        choice.acknowledged(piece)
        chosen.append(piece.coded)
    assert not any(chosen[:3])
    assert abs(np.mean(chosen[3:]) - share) <= (0.05 if plain_s > 0.001 else 0.0)
    assert any(chosen) == (plain_s > 0.001), "a wire that may be slow is tried"
