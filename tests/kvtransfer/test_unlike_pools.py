"""Pools of different block sizes and dtypes, and quantized wires: what arrives means the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer import Completed, Progress, RegisteredPool, allocate
from kvtransfer.layout import DTYPES, block_bytes
from kvtransfer.transports import TransportOptions
from protocol.handoff import SegmentInfo
from tests.kvtransfer.transfer_sides import ReceiverEnd, SenderEnd

Closing = Callable[[Any], Any]
LAYERS, HEADS, HEAD_DIM, NUM_BLOCKS = 3, 2, 8, 24
UNTOUCHED = -3.0


def pool(dtype: str, block_size: int) -> tuple[RegisteredPool, Tensor]:
    """A pool full of `UNTOUCHED`, and its tensor [blocks, layers, 2, block_size, heads, head_dim]."""
    segment = SegmentInfo(name="target", dtype=dtype, shape=(LAYERS, 2, block_size, HEADS, HEAD_DIM))
    nbytes = block_bytes([segment])
    memory = allocate(NUM_BLOCKS * nbytes)
    tensor = torch.frombuffer(memory.buffer, dtype=DTYPES[dtype]).view(NUM_BLOCKS, *segment.shape)
    tensor.fill_(UNTOUCHED)
    return RegisteredPool(memory.buffer, nbytes, NUM_BLOCKS, (segment,), memory.fd), tensor


def tokens_of(tensor: Tensor, blocks: list[int]) -> Tensor:
    """The prompt's KV, one row a token."""
    return tensor[blocks].permute(0, 3, 1, 2, 4, 5).flatten(0, 1).float()


def transfer(
    closing: Closing,
    transport: str,
    theirs: tuple[str, int],
    ours: tuple[str, int],
    num_tokens: int,
    cached: int,
    options: TransportOptions = TransportOptions(),
) -> tuple[Tensor, Tensor, SenderEnd]:
    """Push a prompt whose first `cached` blocks the receiver has; its KV on both sides, token by token."""
    source_pool, source = pool(*theirs)
    target_pool, target = pool(*ours)
    source.copy_(torch.randn(source.shape, generator=torch.Generator().manual_seed(1)))
    sender = closing(SenderEnd([transport], source_pool, options))
    receiver = closing(ReceiverEnd([transport], target_pool))
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()
    source_blocks = order[: -(-num_tokens // theirs[1])]
    target_blocks = order[::-1][: -(-num_tokens // ours[1])]
    receiver.receiver.open("lease", target_blocks, first_block=cached, num_tokens=num_tokens)
    first = cached * ours[1] // theirs[1]
    half = (first + len(source_blocks)) // 2
    for start, end in ((first, half), (half, len(source_blocks))):
        sender.sender.push(
            receiver.peer,
            "lease",
            source_blocks[start:end],
            start,
            num_tokens=num_tokens,
            final=end == len(source_blocks),
        )
    assert isinstance(sender.wait_lease("lease"), Completed)
    progress = receiver.wait_lease("lease")
    assert progress == Progress("lease", len(source_blocks) - first, complete=True)
    untouched = sorted(set(range(NUM_BLOCKS)) - set(target_blocks[cached:]))
    assert (target[untouched] == UNTOUCHED).all()
    return tokens_of(source, source_blocks), tokens_of(target, target_blocks), sender


@pytest.mark.parametrize("theirs", [("bfloat16", 16), ("float32", 8), ("float16", 12)])
@pytest.mark.parametrize("ours", [("bfloat16", 8), ("float32", 32), ("float16", 16)])
@pytest.mark.parametrize(("num_tokens", "cached"), [(75, 0), (96, 1), (65, 2)])
def test_blocks_are_converted_at_the_receiver(
    closing: Closing,
    transport: str,
    theirs: tuple[str, int],
    ours: tuple[str, int],
    num_tokens: int,
    cached: int,
) -> None:
    sent, arrived, _ = transfer(closing, transport, theirs, ours, num_tokens, cached)
    start = cached * ours[1]
    expected = sent.to(DTYPES[ours[0]]).float()
    assert torch.equal(arrived[start:num_tokens], expected[start:num_tokens])
    assert (arrived[num_tokens:] == UNTOUCHED).all()


@pytest.mark.parametrize("wire_dtype", ["int8", "fp8"])
def test_a_quantized_wire_halves_the_bytes(closing: Closing, wire_dtype: str) -> None:
    options = TransportOptions(wire_dtype=wire_dtype)
    sent, arrived, sender = transfer(
        closing, "tcp", ("bfloat16", 16), ("bfloat16", 16), 75, 0, options
    )
    error = (arrived[:75] - sent[:75]).square().mean().sqrt() / sent[:75].square().mean().sqrt()
    assert 0 < error < (0.01 if wire_dtype == "int8" else 0.04)
    nbytes = sender.sender.counters()["tcp_bytes_sent"]
    assert nbytes <= 0.54 * 5 * sender.pool.block_bytes  # blocks this small have a scale for every 128 values
