"""Where a connection's blocks go: straight into the pool, or by way of a staging area that is converted."""

from __future__ import annotations

from typing import Protocol

from kvtransfer.convert import Converter
from kvtransfer.extents import Runs, blocks_per_piece, expand, num_blocks, packed, targets_of
from kvtransfer.interface import RegisteredPool
from kvtransfer.layout import block_bytes, needs_conversion
from kvtransfer.leases import Lease, WriteGate
from kvtransfer.memory import allocate
from kvtransfer.messages import Hello
from kvtransfer.transport import PieceReader


class Incoming(Protocol):
    target: RegisteredPool
    """Where the connection's reader writes to."""

    def take(self, reader: PieceReader, runs: Runs, lease: Lease | None) -> bool:
        """Bring a piece in and into place; None discards it. Returns whether it is in place."""


class Direct:
    """The sender's blocks look like ours."""

    def __init__(self, pool: RegisteredPool) -> None:
        self.target = pool

    def take(self, reader: PieceReader, runs: Runs, lease: Lease | None) -> bool:
        if lease is None:
            return reader.read(packed(runs), None)
        return reader.read(targets_of(runs, lease.blocks), lease.gate)


class Converting:
    """The sender's blocks have another size or dtype, or are quantized on the wire."""

    def __init__(self, pool: RegisteredPool, hello: Hello) -> None:
        wire_bytes = block_bytes(hello.wire)
        max_blocks = blocks_per_piece(hello.block_bytes)
        self._memory = allocate(max_blocks * wire_bytes, shared=False)
        self.target = RegisteredPool(self._memory.buffer, wire_bytes, max_blocks, tuple(hello.wire))
        self._converter = Converter(hello.wire, pool.segments, pool.buffer)

    def take(self, reader: PieceReader, runs: Runs, lease: Lease | None) -> bool:
        staging = WriteGate() if lease is not None else None
        if not reader.read(packed(runs), staging) or lease is None:
            return False
        staged = self.target.buffer[: num_blocks(runs) * self.target.block_bytes]
        with lease.gate.writing() as is_open:
            if is_open:
                positions = expand(runs[:, 1], runs[:, 2])
                self._converter.place(staged, positions, lease.blocks, lease.first_token, lease.num_tokens)
        return is_open


def incoming(pool: RegisteredPool, hello: Hello) -> Incoming:
    if needs_conversion(hello.wire, pool.segments):
        return Converting(pool, hello)
    return Direct(pool)
