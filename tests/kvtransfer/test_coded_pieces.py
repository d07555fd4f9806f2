"""Coded pieces arrive as plain ones do, are chosen where they are faster, and are refused when damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.blocks import codec
from kvtransfer.blocks.codec import Codec
from kvtransfer.interface import Completed
from kvtransfer.messages import CHECKSUM_MISMATCH, GOOD, SPOILED, Ack, Piece
from kvtransfer.streams import coding
from kvtransfer.streams.coding import MEASURED_BYTES, WireCoding
from kvtransfer.streams.pieces import QueuedPiece
from kvtransfer.transports.registry import TransportOptions
from tests.kvtransfer.test_leases import runs
from tests.kvtransfer.test_unlike_pools import BLOCK_SIZE, NUM_BLOCKS, UNTOUCHED, pool, tokens_of, transfer
from tests.kvtransfer.transfer_sides import RawPeer, ReceiverEnd, SenderEnd, moved

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
        (b"\x64\0\0\0" + b"\x79" * 100 + GOOD, Ack(1, CHECKSUM_MISMATCH, again=True)),
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
    monkeypatch.setattr(
        WireCoding, "_try", lambda self, *_: vars(self).update(_ratio=0.7, _encoding_s=0.5e-9)
    )
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
