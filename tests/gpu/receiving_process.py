"""Receives KV in a second process on the GPU."""

from __future__ import annotations

from multiprocessing.connection import Connection

import torch
from torch import Tensor

from kvtransfer.blocks.device import queue_of
from kvtransfer.blocks.layout import block_bytes
from kvtransfer.interface import RegisteredPool
from protocol.handoff import SegmentInfo
from tests.kvtransfer.transfer_sides import ReceiverEnd

DEVICE = "cuda"
NUM_BLOCKS = 32
SEGMENT = SegmentInfo(name="target", dtype="bfloat16", shape=(8, 2, 16, 8, 128))
SPUN = 200_000_000
"""GPU cycles, about 0.1 s, that an engine's step spends before it writes."""
WAIT_S = 60.0


def make_pool() -> tuple[RegisteredPool, Tensor]:
    """Return a pool, and its values with a row for each block."""
    nbytes = block_bytes([SEGMENT])
    blocks = torch.zeros((NUM_BLOCKS, nbytes), dtype=torch.uint8, device=DEVICE)
    queue = queue_of(blocks.device)
    pool = RegisteredPool(memoryview(bytearray()), nbytes, NUM_BLOCKS, (SEGMENT,), device=blocks, queue=queue)
    return pool, blocks.view(torch.bfloat16)


def receive(pipe: Connection, wire: str) -> None:
    """Open leases of the given blocks while a step reads them. Send what the step read, and the received
    values.
    """
    pool, values = make_pool()
    receiver = ReceiverEnd([wire], pool)
    pipe.send(receiver.peer)
    while (lease := pipe.recv()) is not None:
        lease_id, blocks = lease
        index = torch.tensor(blocks, device=DEVICE)  # indexing by a list would wait for the GPU
        values[index] = 3.0
        torch.cuda._sleep(SPUN)
        read = values[index]
        receiver.open(lease_id, blocks)
        pipe.send("open")
        receiver.wait_lease(lease_id, WAIT_S)
        pipe.send((read.float().cpu().numpy(), values[index].float().cpu().numpy()))
    receiver.close()
