"""What a second process on the GPU does: it receives."""

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
        index = torch.tensor(blocks, device=DEVICE)  # a list would be waited for
        values[index] = 3.0
        torch.cuda._sleep(SPUN)
        read = values[index]
        receiver.open(lease_id, blocks)
        pipe.send("open")
        receiver.wait_lease(lease_id, WAIT_S)
        pipe.send((read.float().cpu().numpy(), values[index].float().cpu().numpy()))
    receiver.close()
