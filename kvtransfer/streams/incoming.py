"""The destination of a connection's blocks: directly the pool, or a staging buffer from which they are
converted.
"""

from __future__ import annotations

import numpy as np
import torch

from kvtransfer.blocks.convert import Converter
from kvtransfer.blocks.device import pinned
from kvtransfer.blocks.extents import BlockIndices
from kvtransfer.blocks.layout import block_bytes, foreign_format
from kvtransfer.framing.messages import Hello
from kvtransfer.interface import RegisteredPool
from kvtransfer.leases.gate import WriteGate
from kvtransfer.leases.lease import Lease


class Incoming:
    """Writes the sender's blocks straight to their places, since they have our layout."""

    def __init__(self, target: RegisteredPool, max_blocks: int, foreign: str = "") -> None:
        self.target = target
        """The pool that the connection's reader writes to."""
        self.max_blocks = max_blocks
        """The most of the sender's blocks in one piece."""
        self.foreign_format = foreign
        """`layout.foreign_format` of the incoming blocks."""

    def targets(self, positions: BlockIndices, leased: BlockIndices) -> BlockIndices:
        """Return the blocks of `target` that the reader writes, for a piece that belongs in these `leased`
        ones.
        """
        return leased[positions]

    def place(self, positions: BlockIndices, lease: Lease, block_pool: int, gate: WriteGate) -> bool:
        """Copy the piece from `target` into the lease's blocks if the gate is open; return whether it was."""
        return True


class Converting(Incoming):
    """Converts the sender's blocks: they have another dtype, are quantized on the wire, or go to a GPU's
    memory.
    """

    def __init__(self, pool: RegisteredPool, hello: Hello, max_blocks: int) -> None:
        wire_bytes = block_bytes(hello.wire)
        device = pool.device.device if pool.device is not None else torch.device("cpu")
        staging = pinned(max_blocks * wire_bytes, device)
        target = RegisteredPool(staging, wire_bytes, max_blocks, tuple(hello.wire))
        super().__init__(target, max_blocks, foreign_format(hello.wire, pool.segments))
        blocks = pool.buffer if pool.device is None else pool.device
        self._copies = pool.queue.copies()
        self._converter = Converter(hello.wire, pool.segments, blocks)

    def targets(self, positions: BlockIndices, leased: BlockIndices) -> BlockIndices:
        return np.arange(len(positions))

    def place(self, positions: BlockIndices, lease: Lease, block_pool: int, gate: WriteGate) -> bool:
        staged = self.target.buffer[: len(positions) * self.target.block_bytes]
        with gate.writing() as is_open:
            if is_open:
                with self._copies.within():
                    self._converter.place(staged, positions, lease.blocks[block_pool], lease.num_tokens)
        return is_open


def incoming(pool: RegisteredPool, hello: Hello, max_blocks: int, reaches_devices: bool) -> Incoming:
    """Choose the destination. Checksums are computed on the host, so blocks with one are staged there."""
    if tuple(hello.wire) != pool.segments:
        return Converting(pool, hello, max_blocks)
    if pool.device is not None and not (reaches_devices and hello.checksum == "off"):
        return Converting(pool, hello, max_blocks)
    return Incoming(pool, max_blocks)
