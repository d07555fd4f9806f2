"""Values arrive between pools of different dtypes, on a device or not, and over quantized connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.blocks.device import queue_of
from kvtransfer.blocks.layout import DTYPES, block_bytes
from kvtransfer.blocks.memory import PoolMemory
from kvtransfer.interface import Completed, Progress, RegisteredPool
from kvtransfer.transports.registry import TransportOptions
from protocol.handoff import Extent, SegmentInfo
from tests.kvtransfer.transfer_sides import ReceiverEnd, SenderEnd, moved

Closing = Callable[[Any], Any]
LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 3, 2, 8, 16, 24
UNTOUCHED = -3.0


def pool(dtype: str, device: str | None = None) -> tuple[RegisteredPool, Tensor]:
    """Return a pool full of `UNTOUCHED`, and its tensor [blocks, layers, 2, block_size, heads, head_dim].

    With `device` it is accessed like a pool in a GPU's memory.
    """
    segment = SegmentInfo(name="target", dtype=dtype, shape=(LAYERS, 2, BLOCK_SIZE, HEADS, HEAD_DIM))
    nbytes = block_bytes([segment])
    if device is not None:
        shape = (NUM_BLOCKS, *segment.shape)
        tensor = torch.full(shape, UNTOUCHED, dtype=DTYPES[dtype], device=device)
        blocks = tensor.view(torch.uint8).view(NUM_BLOCKS, nbytes)
        queue = queue_of(blocks.device)
        host = memoryview(bytearray())
        return RegisteredPool(host, nbytes, NUM_BLOCKS, (segment,), device=blocks, queue=queue), tensor
    memory = PoolMemory(NUM_BLOCKS * nbytes)
    tensor = torch.frombuffer(memory.buffer, dtype=DTYPES[dtype]).view(NUM_BLOCKS, *segment.shape)
    tensor.fill_(UNTOUCHED)
    return RegisteredPool(memory.buffer, nbytes, NUM_BLOCKS, (segment,), memory.fd), tensor


def tokens_of(tensor: Tensor, blocks: list[int]) -> Tensor:
    """Return the prompt's KV, one row per token."""
    return tensor[blocks].permute(0, 3, 1, 2, 4, 5).flatten(0, 1).float()


def transfer(
    closing: Closing,
    transport: str,
    theirs: str,
    ours: str,
    num_tokens: int,
    cached: int,
    options: TransportOptions = TransportOptions(),
    devices: tuple[str | None, str | None] = (None, None),
    **sending: Any,
) -> tuple[Tensor, Tensor, SenderEnd]:
    """Push a prompt without its `cached` blocks. Return its KV on both sides, token by token."""
    source_pool, source = pool(theirs, devices[0])
    target_pool, target = pool(ours, devices[1])
    source.copy_(torch.randn(source.shape, generator=torch.Generator().manual_seed(1)))
    sender = closing(SenderEnd([transport], source_pool, options, **sending))
    receiver = closing(ReceiverEnd([transport], target_pool))
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(2)).tolist()
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    source_blocks, target_blocks = order[:num_blocks], order[::-1][:num_blocks]
    receiver.open("lease", target_blocks, first_block=cached, num_tokens=num_tokens)
    half = (cached + num_blocks) // 2
    for start, end in ((cached, half), (half, num_blocks)):
        sender.sender.push(
            receiver.peer,
            "lease",
            [Extent(0, source_blocks[start:end])],
            start,
            num_tokens,
            final=end == num_blocks,
        )
    assert isinstance(sender.wait_lease("lease"), Completed)
    progress = receiver.wait_lease("lease")
    assert progress == Progress("lease", num_blocks - cached, complete=True)
    untouched = sorted(set(range(NUM_BLOCKS)) - set(target_blocks[cached:]))
    assert (target[untouched] == UNTOUCHED).all()
    return tokens_of(source, source_blocks).cpu(), tokens_of(target, target_blocks).cpu(), sender


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16"), ("float16", "float32")],
)
@pytest.mark.parametrize(("num_tokens", "cached"), [(75, 0), (96, 1)])
def test_blocks_are_converted_at_the_receiver(
    closing: Closing, transport: str, theirs: str, ours: str, num_tokens: int, cached: int
) -> None:
    sent, arrived, _ = transfer(closing, transport, theirs, ours, num_tokens, cached)
    start, expected = cached * BLOCK_SIZE, sent.to(DTYPES[ours]).float()
    assert torch.equal(arrived[start:num_tokens], expected[start:num_tokens])
    assert (arrived[num_tokens:] == UNTOUCHED).all()


@pytest.mark.parametrize("wire_dtype", ["int8", "fp8"])
def test_a_quantized_wire_halves_the_bytes(closing: Closing, wire_dtype: str) -> None:
    options = TransportOptions(wire_dtype=wire_dtype)
    sent, arrived, sender = transfer(closing, "tcp", "bfloat16", "bfloat16", 75, 0, options)
    error = (arrived[:75] - sent[:75]).square().mean().sqrt() / sent[:75].square().mean().sqrt()
    assert 0 < error < (0.01 if wire_dtype == "int8" else 0.04)
    nbytes = moved(sender.sender.pairs, "tcp")
    assert nbytes <= 0.54 * 5 * sender.pool.block_bytes  # blocks this small have a scale for every 128 values


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
"""The CPU runs the same code as a GPU, except for pinned memory and streams."""
SIDES = ["both", "sender", "receiver"]
BY_UCX = [(sides, "ucx", "cpu") for sides in SIDES]
"""On the CPU only: within one process UCX does not read from a GPU's memory (`tests/gpu` has two processes),
nor, without RDMA, from a GPU's memory into the host's.
"""
WIRES = [(sides, "tcp", device) for sides in SIDES for device in DEVICES] + BY_UCX
WIRES += [("receiver", "shm", device) for device in DEVICES]


@pytest.mark.parametrize(("sides", "transport", "device"), WIRES)
@pytest.mark.parametrize("ours", ["bfloat16", "float32"])
@pytest.mark.parametrize(("num_tokens", "cached"), [(75, 0), (96, 1)])
def test_pools_on_a_device(
    closing: Closing, transport: str, device: str, ours: str, num_tokens: int, cached: int, sides: str
) -> None:
    devices = (None if sides == "receiver" else device, None if sides == "sender" else device)
    checksum = "full" if transport == "tcp" else "off"
    sent, arrived, _ = transfer(
        closing, transport, "bfloat16", ours, num_tokens, cached, devices=devices, checksum=checksum
    )
    start = cached * BLOCK_SIZE
    assert torch.equal(arrived[start:num_tokens], sent[start:num_tokens])


@pytest.mark.parametrize("device", DEVICES)
def test_a_devices_blocks_are_quantized_on_the_wire(closing: Closing, device: str) -> None:
    options = TransportOptions(wire_dtype="int8")
    _, on_host, _ = transfer(closing, "tcp", "bfloat16", "bfloat16", 75, 1, options)
    _, on_device, _ = transfer(closing, "tcp", "bfloat16", "bfloat16", 75, 1, options, (device, device))
    assert torch.equal(on_host[16:75], on_device[16:75])
