"""A device's blocks are sent once they are computed and written once nothing reads them (see
`ordered_device`).

Nothing waits for work that is launched later.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.blocks import device
from kvtransfer.blocks.device import BlockGatherer, CudaQueue
from kvtransfer.blocks.layout import block_bytes
from kvtransfer.blocks.memory import PoolMemory
from kvtransfer.interface import Completed, RegisteredPool
from kvtransfer.transports.registry import TransportOptions
from kvtransfer.transports.ucx_agent import Agent, Memory, Remote
from tests.kvtransfer.ordered_device import SEGMENT, OrderedDevice
from tests.kvtransfer.transfer_sides import ReceiverEnd, SenderEnd

Closing = Callable[[Any], Any]
NUM_BLOCKS, BLOCK_BYTES = 8, block_bytes([SEGMENT])
WIRES = ["tcp", "ucx"]


def ends(
    closing: Closing, wire: str, source: OrderedDevice, target: OrderedDevice, **sending: Any
) -> tuple[SenderEnd, ReceiverEnd]:
    sender = closing(SenderEnd([wire], source.pool, **sending))
    return sender, closing(ReceiverEnd([wire], target.pool))


def host_pool() -> RegisteredPool:
    memory = PoolMemory(NUM_BLOCKS * BLOCK_BYTES)
    return RegisteredPool(memory.buffer, BLOCK_BYTES, NUM_BLOCKS, (SEGMENT,), memory.fd)


@pytest.fixture
def source() -> OrderedDevice:
    return OrderedDevice(NUM_BLOCKS)


@pytest.fixture
def target() -> OrderedDevice:
    return OrderedDevice(NUM_BLOCKS)


@pytest.mark.parametrize(("wire", "checksum"), [("tcp", "off"), ("tcp", "full"), ("ucx", "off")])
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


@pytest.mark.parametrize("wire", WIRES)
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


@pytest.mark.parametrize("wire", WIRES)
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
    source.blocks.copy_(torch.arange(NUM_BLOCKS).unsqueeze(1).expand(-1, BLOCK_BYTES))
    gatherer = BlockGatherer(source.blocks, source, NUM_BLOCKS)
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
    copies = CudaQueue(torch.device("cuda", 0)).copies()
    with nullcontext() if error is None else pytest.raises(torch.OutOfMemoryError), copies.within():
        assert not done
        if error is not None:
            raise error
    assert done == ["all"]
