"""Pools of different dtypes and on devices: values arrive, in order with the device's own work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.parallel.pools import HeldPool
from kvtransfer.blocks import device
from kvtransfer.blocks.convert import Converter
from kvtransfer.blocks.device import BlockGatherer, Queue, queue_of
from kvtransfer.blocks.layout import DTYPES, JoinedBlocks, block_bytes, wire_segments
from kvtransfer.blocks.memory import PoolMemory
from kvtransfer.interface import Completed, Progress, RegisteredPool
from kvtransfer.transports.registry import TransportOptions
from kvtransfer.transports.tcp import QuantizingWriter
from kvtransfer.transports.ucx_agent import Agent, Memory, Remote
from protocol.handoff import Extent, SegmentInfo
from tests.kvtransfer.ordered_device import SEGMENT, OrderedDevice
from tests.kvtransfer.transfer_sides import ReceiverEnd, SenderEnd, moved

Closing = Callable[[Any], Any]
LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 3, 2, 8, 16, 24
UNTOUCHED = -3.0


@pytest.fixture(autouse=True)
def driver(request: pytest.FixtureRequest) -> None:
    """Replace CUDA's driver where a test uses it."""
    case = getattr(request.node, "callspec", None)
    if case is not None and "cuda_ipc" in case.params.values():
        request.getfixturevalue("fake_cuda")


def pool(dtype: str, device: str | None = None) -> tuple[RegisteredPool, Tensor]:
    """Return an `UNTOUCHED` pool, on a device or not: [blocks, layers, 2, block_size, heads, head_dim]."""
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
"""Within one process UCX does not read from a GPU's memory (`tests/gpu` has two processes)."""
WIRES = [(sides, "tcp", device) for sides in SIDES for device in DEVICES] + BY_UCX
WIRES += [("receiver", "shm", device) for device in DEVICES]
WIRES += [("both", "cuda_ipc", "cpu")]


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


def in_parts(whole: RegisteredPool, tensor: Tensor) -> tuple[RegisteredPool, JoinedBlocks]:
    """Return a pool of the same blocks, with each head on a device of its own."""
    parts = []
    for head in range(HEADS):
        own = tensor[..., head : head + 1, :].contiguous()
        segment = msgspec.structs.replace(whole.segments[0], shape=tuple(own.shape[1:]))
        blocks = own.view(torch.uint8).view(NUM_BLOCKS, -1)
        parts.append(HeldPool(blocks, (segment,), {segment.name: slice(head, head + 1)}))
    joined = JoinedBlocks(whole.segments, parts)
    return replace(whole, device=joined), joined


@pytest.mark.parametrize("wire_dtype", ["int8", "fp8"])
def test_blocks_in_parts_are_packed_and_unpacked_like_whole_ones(wire_dtype: str) -> None:
    whole, tensor = pool("bfloat16", "cpu")
    tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
    divided, joined = in_parts(whole, tensor)
    sent, num_tokens = np.array([[9, 2, 3, 5], [0, 1, 2, 3]]), 55
    packed = [QuantizingWriter(each, wire_dtype).source(sent, num_tokens)[0] for each in (whole, divided)]
    wire, to = wire_segments(whole.segments, wire_dtype), np.array([4, 11, 0, 1])
    end = sent.shape[1] * block_bytes(wire)
    assert packed[0][:end] == packed[1][:end]
    for each in (whole, divided):
        assert each.device is not None
        Converter(wire, whole.segments, each.device).place(packed[0], sent[1], to, num_tokens)
    assert torch.equal(joined[:], tensor.view(torch.uint8).view(NUM_BLOCKS, -1))


ORDERED_BLOCKS, BLOCK_BYTES = 8, block_bytes([SEGMENT])
ORDERED = ["tcp", "ucx", "cuda_ipc"]


def ends(
    closing: Closing, wire: str, source: OrderedDevice, target: OrderedDevice, **sending: Any
) -> tuple[SenderEnd, ReceiverEnd]:
    sender = closing(SenderEnd([wire], source.pool, **sending))
    return sender, closing(ReceiverEnd([wire], target.pool))


def host_pool() -> RegisteredPool:
    memory = PoolMemory(ORDERED_BLOCKS * BLOCK_BYTES)
    return RegisteredPool(memory.buffer, BLOCK_BYTES, ORDERED_BLOCKS, (SEGMENT,), memory.fd)


@pytest.fixture
def source() -> OrderedDevice:
    return OrderedDevice(ORDERED_BLOCKS)


@pytest.fixture
def target() -> OrderedDevice:
    return OrderedDevice(ORDERED_BLOCKS)


@pytest.mark.parametrize(
    ("wire", "checksum"), [("tcp", "off"), ("tcp", "full"), ("ucx", "off"), ("cuda_ipc", "off")]
)
def test_a_push_sends_the_results_of_earlier_launches(
    closing: Closing, wire: str, checksum: str, source: OrderedDevice, target: OrderedDevice
) -> None:
    sender, receiver = ends(closing, wire, source, target, checksum=checksum)
    receiver.open("lease", [4, 1, 6])
    for place, block in enumerate([2, 3, 5]):
        source.write(block, 10 + place)
    pushed = source.mark()
    sender.push(receiver.peer, "lease", [2, 3, 5])
    later = source.read(2)
    source.write(2, 99)  # the next step, which must not be waited for
    assert isinstance(sender.wait_lease("lease"), Completed)
    receiver.wait_lease("lease")
    assert [int(target.blocks[block, -1]) for block in (4, 1, 6)] == [10, 11, 12]
    assert not sender.sender.counters().get("pieces_sent_again"), "right at the first attempt"
    assert not later
    assert source.num_done == pushed._count  # type: ignore[attr-defined]


@pytest.mark.parametrize("wire", ORDERED)
def test_a_chunk_is_sent_while_the_next_one_is_computed(
    closing: Closing, wire: str, source: OrderedDevice, target: OrderedDevice
) -> None:
    sender, receiver = ends(closing, wire, source, target)
    receiver.open("lease", [0, 1])
    source.write(0, 10)
    sender.push(receiver.peer, "lease", [0], final=False)
    source.write(1, 11)
    sender.wait_for(lambda event: event.blocks == 1)
    assert int(target.blocks[0, 0]) == 10
    assert source.num_done == 1
    sender.push(receiver.peer, "lease", [1], first=1)
    receiver.wait_lease("lease")
    assert int(target.blocks[1, 0]) == 11


@pytest.mark.parametrize("wire", ORDERED)
def test_blocks_are_written_once_nothing_reads_them(
    closing: Closing, wire: str, source: OrderedDevice, target: OrderedDevice
) -> None:
    sender, receiver = ends(closing, wire, source, target)
    target.write(3, 50)
    before = target.read(3)  # of the request that had the block before
    receiver.open("lease", [3])
    unrelated = target.read(0)
    source.write(0, 10)
    sender.push(receiver.peer, "lease", [0])
    receiver.wait_lease("lease")
    assert before == [50]
    assert not unrelated
    assert int(target.blocks[3, 0]) == 10


def test_a_quantized_wire_waits_for_the_values_too(
    closing: Closing, source: OrderedDevice, target: OrderedDevice
) -> None:
    sender = closing(SenderEnd(["tcp"], source.pool, TransportOptions(wire_dtype="int8")))
    receiver = closing(ReceiverEnd(["tcp"], target.pool))
    receiver.open("lease", [1])
    source.launch(lambda: source.blocks[0].view(torch.float32).fill_(0.5))
    sender.push(receiver.peer, "lease", [0])
    receiver.wait_lease("lease")
    torch.testing.assert_close(target.blocks[1].view(torch.float32), torch.full((1024,), 0.5))


@pytest.mark.parametrize("on_device", [True, False])
def test_ucx_is_tested_with_the_memory_that_blocks_are_read_into(
    closing: Closing,
    on_device: bool,
    source: OrderedDevice,
    target: OrderedDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transport that reads between GPUs may not reach the host's memory."""
    prepared, prepare = [], Agent.prepare

    def noted(agent: Agent, memory: Memory, remote: Remote | None = None) -> int:
        if remote is None:
            prepared.append(memory.address)
        return prepare(agent, memory, remote)

    monkeypatch.setattr(Agent, "prepare", noted)
    sender = closing(SenderEnd(["ucx"], source.pool))
    receiver = closing(ReceiverEnd(["ucx"], target.pool if on_device else host_pool()))
    receiver.open("lease", [0])
    sender.push(receiver.peer, "lease", [0])
    receiver.wait_lease("lease")
    (transport,) = receiver.wires
    assert (transport._probed.data_ptr() in prepared) == on_device


def test_slices_are_processed_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, source: OrderedDevice
) -> None:
    monkeypatch.setattr(device, "SLICE_BYTES", 2 * BLOCK_BYTES)
    source.blocks.copy_(torch.arange(ORDERED_BLOCKS).unsqueeze(1).expand(-1, BLOCK_BYTES))
    gatherer = BlockGatherer(source.blocks, source, ORDERED_BLOCKS)
    order = np.array([6, 7, 3, 0, 1])
    gatherer.buffer[:] = bytes(gatherer.buffer.nbytes)
    arriving = gatherer.gather(order)
    assert arriving.lengths == [2 * BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES]
    assert not any(gatherer.buffer), "nothing came before it was waited for"
    (first,) = arriving[:1]
    assert [first[0], first[BLOCK_BYTES]] == [6, 7]
    assert not any(gatherer.buffer[2 * BLOCK_BYTES :])
    assert [part[0] for part in arriving[1:]] == [3, 1]
    assert bytes(gatherer.buffer[3 * BLOCK_BYTES : 4 * BLOCK_BYTES]) == bytes(BLOCK_BYTES)
    assert arriving[5:] == []


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("no room for what comes next")])
def test_local_copies_finish_even_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Their target blocks are freed afterwards."""
    done: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            pass

        def synchronize(self) -> None:
            done.append("all")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    copies = Queue(torch.device("cuda", 0)).copies()
    with nullcontext() if error is None else pytest.raises(torch.OutOfMemoryError), copies.within():
        assert not done
        if error is not None:
            raise error
    assert done == ["all"]
