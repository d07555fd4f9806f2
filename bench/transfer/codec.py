"""The lossless code of bf16 KV: bytes and speed on a model's own KV, and the gain on this wire.

Loopback shows that a fast wire stays plain. In a network namespace whose loopback is shaped (`unshare --net`,
`tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 20ms`) the wire is slow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

from bench.transfer import raw
from bench.transfer.accuracy import Handoffs
from bench.transfer.process import ProcessObject
from bench.transfer.row import TransferRow, ratio_row
from bench.transfer.sides import Pair, scattered
from kvtransfer.blocks.codec import SLICE_BYTES, Codec, slices
from kvtransfer.transports.registry import TransportOptions

PROMPTS = 8
"""Number of held-out prompts, of some 2,500 tokens each, whose KV is coded."""


def codec(repeats: int, model: str) -> Iterator[TransferRow]:
    handoffs = Handoffs("bfloat16", model, PROMPTS)
    kv = bytearray().join(prompt.blocks for prompt in handoffs.prompts)
    yield from _alone(kv, handoffs.block_bytes, repeats, model.rpartition("/")[2])
    yield _over_tcp(kv, handoffs, repeats)


def _alone(kv: bytearray, block_bytes: int, repeats: int, model: str) -> Iterator[TransferRow]:
    """Measure one thread's coding, and copies of the same slices to a buffer of the same size."""
    coder, plain, back = Codec(block_bytes), memoryview(kv), memoryview(bytearray(len(kv)))
    copied = memoryview(bytearray(SLICE_BYTES))
    blocks, seconds, coded_bytes = np.arange(len(kv) // block_bytes), [], 0

    for _ in range(repeats + 1):
        spent, coded_bytes = np.zeros(3), 0
        for first, last in slices(len(kv)):
            at = [time.perf_counter()]
            coded_bytes += (size := len(coder.encode(plain, blocks, first, last)))
            at.append(time.perf_counter())
            coder.decode(size, back, blocks, first, last)
            at.append(time.perf_counter())
            copied[: last - first] = plain[first:last]
            spent += np.diff([*at, time.perf_counter()])
        seconds.append(spent)
    if back != plain:
        raise RuntimeError("the code does not give the same bytes back")
    encode, decode, copy = (len(kv) / 1e9 / float(each) for each in np.median(seconds[1:], axis=0))
    share, beside = coded_bytes / len(kv), f"memcpy {copy:.1f} GB/s"
    yield TransferRow(what=f"code, {model}: bytes", value=share, at_most=0.72, baseline="bfloat16")
    for what, rate, least in (("encoding", encode, 2), ("decoding", decode, 3)):
        yield TransferRow(what=f"code: {what}", value=rate, unit=" GB/s", at_least=least, baseline=beside)


def _over_tcp(kv: bytearray, handoffs: Handoffs, repeats: int) -> TransferRow:
    size, segments = handoffs.block_bytes, tuple(handoffs.segments)
    num_blocks = raw.TOTAL_BYTES // size
    with ExitStack() as stack:
        plain, chosen = (
            stack.enter_context(
                Pair(
                    ["tcp"],
                    size,
                    num_blocks,
                    start=lambda *each, codec=codec: ProcessObject(
                        *each, TransportOptions(wire_codec=codec), segments
                    ),
                )
            )
            for codec in ("off", "auto")
        )
        rounds, order = [], scattered(num_blocks)
        for pair in (plain, chosen):
            pair.sender.call("fill", bytes(kv))
        for _ in range(repeats + 1):
            rounds.append((plain.move("tcp", order).seconds, (moved := chosen.move("tcp", order)).seconds))
    what = f"tcp, code where it is faster: sent {moved.nbytes / (num_blocks * size):.2f} of the bytes"
    return ratio_row(what, rounds[1:], num_blocks * size, 0.99, "without")
