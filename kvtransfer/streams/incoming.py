"""Where a connection's blocks go: straight into the pool, or by way of a staging area that is converted."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from kvtransfer.blocks.convert import Converter
from kvtransfer.blocks.device import in_order, pinned
from kvtransfer.blocks.extents import BlockIndices
from kvtransfer.blocks.layout import block_bytes, foreign_format, needs_conversion
from kvtransfer.framing.messages import Hello
from kvtransfer.interface import RegisteredPool
from kvtransfer.leases.gate import WriteGate
from kvtransfer.leases.lease import Lease


class Incoming(Protocol):
    target: RegisteredPool
    """Where the connection's reader writes to."""
    foreign_format: str
    """`layout.foreign_format` of what comes."""
    max_blocks: int
    """The most of the sender's blocks in one piece."""

    def targets(self, positions: BlockIndices, lease: Lease) -> BlockIndices:
        """The blocks of `target` that the reader is to bring a piece into."""

    def place(self, positions: BlockIndices, lease: Lease, gate: WriteGate) -> bool:
        """Bring it from there into the lease's blocks, if the gate is open still."""


class Direct:
    """The sender's blocks look like ours."""

    def __init__(self, pool: RegisteredPool, max_blocks: int) -> None:
        self.target = pool
        self.foreign_format = ""
        self.max_blocks = max_blocks

    def targets(self, positions: BlockIndices, lease: Lease) -> BlockIndices:
        return lease.blocks[positions]

    def place(self, positions: BlockIndices, lease: Lease, gate: WriteGate) -> bool:
        return True


class Converting:
    """The sender's blocks have another size or dtype, are quantized on the wire, or go to a GPU's memory."""

    def __init__(self, pool: RegisteredPool, hello: Hello, max_blocks: int) -> None:
        wire_bytes = block_bytes(hello.wire)
        self.max_blocks = max_blocks
        self._device = pool.device.device if pool.device is not None else torch.device("cpu")
        staging = pinned(max_blocks * wire_bytes, self._device)
        self.target = RegisteredPool(staging, wire_bytes, max_blocks, tuple(hello.wire))
        blocks = pool.buffer if pool.device is None else pool.device
        self._converter = Converter(hello.wire, pool.segments, blocks)
        self.foreign_format = foreign_format(hello.wire, pool.segments)

    def targets(self, positions: BlockIndices, lease: Lease) -> BlockIndices:
        return np.arange(len(positions))

    def place(self, positions: BlockIndices, lease: Lease, gate: WriteGate) -> bool:
        staged = self.target.buffer[: len(positions) * self.target.block_bytes]
        with gate.writing() as is_open:
            if is_open:
                with in_order(self._device):
                    self._converter.place(
                        staged, positions, lease.blocks, lease.first_token, lease.num_tokens
                    )
        return is_open


def incoming(pool: RegisteredPool, hello: Hello, max_blocks: int, reaches_devices: bool) -> Incoming:
    """Checksums are made on the host, so that what has one passes through it."""
    if needs_conversion(hello.wire, pool.segments):
        return Converting(pool, hello, max_blocks)
    if pool.device is not None and not (reaches_devices and hello.checksum == "off"):
        return Converting(pool, hello, max_blocks)
    return Direct(pool, max_blocks)
