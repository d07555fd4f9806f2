"""KV between the pools of two processes on one GPU."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from torch import Tensor

from kvtransfer import Completed, RegisteredPool
from kvtransfer.blocks.device import queue_of
from kvtransfer.blocks.layout import block_bytes
from kvtransfer.interface import TransferError
from kvtransfer.transports.registry import TransportOptions
from kvtransfer.transports.ucx.bindings import bindings
from protocol.handoff import SegmentInfo
from tests.kvtransfer.transfer_sides import ReceiverEnd, SenderEnd

DEVICE = "cuda"
NUM_BLOCKS = 32
SEGMENT = SegmentInfo(name="target", dtype="bfloat16", shape=(8, 2, 16, 8, 128))
WIRES = ["tcp", "ucx"]
SPUN = 200_000_000
"""Cycles, some 0.1 s, for which a step of the engine is busy before it writes."""
WAIT_S = 60.0


def make_pool() -> tuple[RegisteredPool, Tensor]:
    """And its values, a row for each block."""
    nbytes = block_bytes([SEGMENT])
    blocks = torch.zeros((NUM_BLOCKS, nbytes), dtype=torch.uint8, device=DEVICE)
    queue = queue_of(blocks.device)
    pool = RegisteredPool(memoryview(bytearray()), nbytes, NUM_BLOCKS, (SEGMENT,), device=blocks, queue=queue)
    return pool, blocks.view(torch.bfloat16)


def receive(pipe: Connection, wire: str) -> None:
    """Opens leases of the blocks that it is told, while a step that reads them is under way; answers what
    that step read, and what came.
    """
    pool, values = make_pool()
    receiver = ReceiverEnd([wire], pool)
    pipe.send(receiver.peer)
    while (lease := pipe.recv()) is not None:
        lease_id, blocks = lease
        values[blocks] = 3.0
        torch.cuda._sleep(SPUN)
        read = values[blocks].clone()
        receiver.open(lease_id, blocks)
        pipe.send("open")
        receiver.wait_lease(lease_id, WAIT_S)
        pipe.send((read.float().cpu().numpy(), values[blocks].float().cpu().numpy()))
    receiver.close()


@pytest.fixture(params=WIRES)
def peer(request: pytest.FixtureRequest) -> Iterator[tuple[str, Connection]]:
    if request.param == "ucx":
        try:
            bindings()
        except TransferError as error:
            pytest.skip(str(error))
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=receive, args=(theirs, request.param), daemon=True)
    process.start()
    yield request.param, ours
    ours.send(None)
    process.join(WAIT_S)
    assert process.exitcode == 0


def test_what_a_step_computes_arrives_and_nothing_waits_for_the_next_one(
    peer: tuple[str, Connection],
) -> None:
    wire, pipe = peer
    pool, values = make_pool()
    sender = SenderEnd([wire], pool)
    address = pipe.recv()
    for number in range(3):
        blocks = list(range(number, NUM_BLOCKS, 3))
        pipe.send((f"lease-{number}", blocks))
        assert pipe.recv() == "open"
        torch.cuda._sleep(SPUN)
        values[blocks] = torch.arange(len(blocks), device=DEVICE, dtype=torch.bfloat16).unsqueeze(1) + number
        sender.push(address, f"lease-{number}", blocks)
        next_step = torch.cuda.Event()
        for _ in range(20):
            torch.cuda._sleep(SPUN)
        next_step.record()
        assert isinstance(sender.wait_lease(f"lease-{number}", WAIT_S), Completed)
        if number:  # the first lease waits for the wire
            assert not next_step.query()
        read, came = pipe.recv()
        assert (read == 3.0).all()
        assert [row[0] for row in came] == [index + number for index in range(len(blocks))]
        assert (came == came[:, :1]).all()
    sender.close()


@pytest.mark.parametrize("wire_dtype", ["int8", "fp8"])
def test_values_are_quantized_on_the_wire(wire_dtype: str) -> None:
    (source_pool, source), (target_pool, target) = make_pool(), make_pool()
    source.copy_(torch.randn(source.shape, device=DEVICE))
    sender = SenderEnd(["tcp"], source_pool, TransportOptions(wire_dtype=wire_dtype))
    receiver = ReceiverEnd(["tcp"], target_pool)
    receiver.open("lease", list(range(NUM_BLOCKS)))
    sender.push(receiver.peer, "lease", list(range(NUM_BLOCKS)))
    assert isinstance(sender.wait_lease("lease", WAIT_S), Completed)
    receiver.wait_lease("lease", WAIT_S)
    error = (target.float() - source.float()).norm() / source.float().norm()
    assert 0 < float(error) < 0.05
    sender.close()
    receiver.close()
