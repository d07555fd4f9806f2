"""What NIXL itself can do: bare reads and writes of a whole pool between two processes, and ours beside them.

`python -m bench.transfer_nixl` moves 256 MB in scattered blocks of 1.75 MB and of 16 KiB over several choices
of UCX's transports: as one NIXL request each way, through the reader of our `ucx` transport in pieces as the
link sends them, and with a plain memcpy. All take turns in the same pair of processes.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvtransfer import RegisteredPool, allocate
from kvtransfer.channel import Channel, Wake
from kvtransfer.extents import Runs, blocks_per_piece
from kvtransfer.leases import WriteGate
from kvtransfer.memory import map_peer_pool
from kvtransfer.messages import WIRE_VERSION, Hello
from kvtransfer.ucx import UcxTransport
from kvtransfer.ucx.agent import ENGINE_CONFIG
from kvtransfer.ucx.bindings import bindings

TOTAL_BYTES = 256 * 1024 * 1024
BLOCK_BYTES = (1792 * 1024, 16 * 1024)
TLS = ("tcp", "cma,tcp", "all")
WAYS = ("memcpy", "write", "read", "ours")
_WAIT_S = 60.0
_POLL_S = 0.0002


@dataclass(frozen=True)
class Measured:
    """One way of moving the whole pool: medians of its rounds, CPU seconds summed over both processes."""

    tls: str
    block_bytes: int
    way: str
    seconds: float
    cpu_seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        return TOTAL_BYTES / self.seconds / 1e9


class _Side:
    """One process: a pool, a bare agent and a transport of ours."""

    def __init__(self, tls: str, block_bytes: int, name: str) -> None:
        os.environ.update(UCX_TLS=tls, UCX_PROTO_EMULATION_ENABLE="y")  # plain TCP is measured too
        self.block_bytes = block_bytes
        self.num_blocks = TOTAL_BYTES // block_bytes
        self.memory = allocate(TOTAL_BYTES)
        np.frombuffer(self.memory.buffer, dtype=np.uint8).fill(1)  # touches every page
        self.pool = RegisteredPool(self.memory.buffer, block_bytes, self.num_blocks, memory_fd=self.memory.fd)
        self.address = int(np.frombuffer(self.memory.buffer, dtype=np.uint8).ctypes.data)
        self.transport = UcxTransport(self.pool, name)
        self.wake = Wake()
        nixl = self.nixl = bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, 50_000
        self.agent = nixl.nixlAgent(f"bare-{name}", config)
        parameters, _ = self.agent.getPluginParams("UCX")
        self.backend = self.agent.createBackend("UCX", {**parameters, "engine_config": ENGINE_CONFIG})
        region = nixl.nixlRegDList(nixl.DRAM_SEG, [(self.address, TOTAL_BYTES, 0, "")])
        self.agent.registerMem(region, [self.backend])

    def prepare(self, owner: str | bytes, address: int) -> int:
        blocks = np.array(
            [[address, self.block_bytes, 0, self.block_bytes, self.num_blocks]], dtype=np.uint64
        )
        return int(self.agent.prepXferDlist(owner, self.nixl.DRAM_SEG, blocks, [self.backend]))


def _passive(pipe: Connection, tls: str, block_bytes: int) -> None:
    """The side that owns the other end of each transfer."""
    side = _Side(tls, block_bytes, "passive")
    pipe.send((side.agent.getLocalMD(), side.address, os.getpid(), side.memory.fd))
    side.agent.loadRemoteMD(pipe.recv())
    channel = Channel(side.transport.connect(pipe.recv()), side.wake)
    deadline = time.monotonic() + _WAIT_S
    channel.finish_connect(deadline)
    side.transport.writer(channel, side.pool, deadline)
    while pipe.recv():
        pipe.send(time.process_time())


class _Active(_Side):
    def __init__(self, pipe: Connection, tls: str, block_bytes: int) -> None:
        super().__init__(tls, block_bytes, "active")
        metadata, address, pid, fd = pipe.recv()
        pipe.send(self.agent.getLocalMD())
        remote = self.agent.loadRemoteMD(metadata)
        self.ours = self.prepare(self.nixl.NIXL_INIT_AGENT, self.address)
        self.theirs = self.prepare(remote, address)
        listener, listening = self.transport.listen("127.0.0.1")
        pipe.send(listening)
        channel = Channel(listener.accept()[0], self.wake)
        hello = Hello(
            version=WIRE_VERSION,
            nonce=bytes(32),
            transport="ucx",
            worker_id="bench",
            incarnation="1",
            receiver_incarnation="1",
            block_bytes=block_bytes,
            num_blocks=self.num_blocks,
            segments=[],
            wire=[],
        )
        self.reader = self.transport.reader(channel, self.pool, hello, time.monotonic() + _WAIT_S, _WAIT_S)
        descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        self.source = map_peer_pool(descriptor, TOTAL_BYTES)
        self.there = np.arange(self.num_blocks, dtype=np.int32)
        np.random.default_rng(0).shuffle(self.there)
        self.here = np.arange(self.num_blocks, dtype=np.int32)

    def memcpy(self) -> None:
        source = int(np.frombuffer(self.source, dtype=np.uint8).ctypes.data)
        ctypes.memmove(self.address, source, TOTAL_BYTES)

    def write(self) -> None:
        self._request(self.nixl.NIXL_WRITE)

    def read(self) -> None:
        self._request(self.nixl.NIXL_READ)

    def _request(self, operation: Any) -> None:
        request = self.agent.makeXferReq(
            operation, self.ours, self.here, self.theirs, self.there, b"", [self.backend], False
        )
        status = self.agent.postXferReq(request)
        while status == self.nixl.NIXL_IN_PROG:
            time.sleep(_POLL_S)
            status = self.agent.getXferStatus(request)
        self.agent.releaseXferReq(request)

    def ours_in_pieces(self) -> None:
        size = blocks_per_piece(self.block_bytes)
        for start in range(0, self.num_blocks, size):
            there, here = self.there[start : start + size], self.here[start : start + size]
            runs: Runs = np.column_stack((there, here, np.ones_like(here)))
            if not self.reader.read(runs, WriteGate()):
                raise RuntimeError("a piece was not read")


def _active(pipe: Connection, results: Connection, tls: str, block_bytes: int, rounds: int) -> None:
    side = _Active(pipe, tls, block_bytes)
    ways: dict[str, Callable[[], None]] = {
        "memcpy": side.memcpy,
        "write": side.write,
        "read": side.read,
        "ours": side.ours_in_pieces,
    }

    def cpu() -> float:
        pipe.send(True)
        return time.process_time() + float(pipe.recv())

    timings: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds + 1):
        for way, move in ways.items():
            used = cpu()
            started = time.perf_counter()
            move()
            seconds = time.perf_counter() - started
            timings[way].append((seconds, cpu() - used))
    results.send(
        [
            Measured(
                tls, block_bytes, way, *(statistics.median(column) for column in zip(*rows[1:], strict=True))
            )
            for way, rows in timings.items()
        ]
    )
    pipe.send(False)


def measure(tls: str, block_bytes: int, rounds: int = 5) -> list[Measured]:
    """Every way once per round, the first round not counted; the median of each."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    results, sink = context.Pipe()
    passive = context.Process(target=_passive, args=(theirs, tls, block_bytes), daemon=True)
    active = context.Process(target=_active, args=(ours, sink, tls, block_bytes, rounds), daemon=True)
    for process in (passive, active):
        process.start()
    for end in (ours, theirs, sink):
        end.close()
    measured: list[Measured] = results.recv()
    for process in (active, passive):
        process.join(_WAIT_S)
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tls", nargs="+", default=TLS, help="values of UCX_TLS to go through")
    parser.add_argument("--block-bytes", nargs="+", type=int, default=BLOCK_BYTES)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(arguments)
    print(
        f"{'UCX_TLS':10} {'block':>9} " + " ".join(f"{way:>8} {'cpu s':>6}" for way in WAYS) + "  ours/best"
    )
    for tls in chosen.tls:
        for block_bytes in chosen.block_bytes:
            rows = {row.way: row for row in measure(tls, block_bytes, chosen.rounds)}
            best = min(rows["read"].seconds, rows["write"].seconds)
            cells = " ".join(
                f"{rows[way].gigabytes_per_second:8.2f} {rows[way].cpu_seconds:6.3f}" for way in WAYS
            )
            print(f"{tls:10} {block_bytes:9} {cells}  {best / rows['ours'].seconds:.2f}", flush=True)


if __name__ == "__main__":
    main()
