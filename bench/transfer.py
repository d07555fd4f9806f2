"""KV transfer speed between two processes against the raw wire, measured in the same run, interleaved.

`python -m bench.transfer` moves 256 MB in scattered blocks of 1.75 MB and of 16 KiB over each transport.
`shm` is compared with a plain memcpy from one shared mapping into another, `tcp` with one raw
`sendall` / `recv_into` stream over loopback with the same socket buffers.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import random
import socket
import statistics
import threading
import time
from multiprocessing.connection import Connection

import numpy as np

from kvtransfer import Completed, Failed, Receiver, RegisteredPool, Sender, allocate
from kvtransfer.memory import map_peer_pool
from kvtransfer.tcp import TcpTransport
from kvtransfer.transports import open_transports
from protocol.messages import PeerAddress

TOTAL_BYTES = 256 * 1024 * 1024
BLOCK_BYTES = (1792 * 1024, 16 * 1024)
KEY = bytes(32)
CHUNK_BYTES = 4 * 1024 * 1024


def make_pool(nbytes: int, block_bytes: int) -> RegisteredPool:
    memory = allocate(nbytes)
    np.frombuffer(memory.buffer, dtype=np.uint8).fill(1)  # touches every page
    return RegisteredPool(memory.buffer, block_bytes, nbytes // block_bytes, memory_fd=memory.fd)


def address(buffer: object) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)  # type: ignore[call-overload]


def receiving_side(pipe: Connection, block_bytes: int) -> None:
    """Serve the sending side's commands until the pipe closes."""
    pool = make_pool(TOTAL_BYTES, block_bytes)
    receiver = Receiver(
        pool,
        key=KEY,
        worker_id="decode",
        incarnation="1",
        transports=open_transports(["shm", "tcp"], pool, "decode"),
        host="127.0.0.1",
        on_event=lambda: None,
    )
    listener, raw_address = TcpTransport().listen("127.0.0.1")
    peer_fd = os.open(f"/proc/{os.getppid()}/fd/{pipe.recv()}", os.O_RDWR)
    source = map_peer_pool(peer_fd, TOTAL_BYTES)
    pipe.send((receiver.offers, raw_address))
    stream, _ = listener.accept()
    while True:
        try:
            command = pipe.recv()
        except EOFError:
            break
        if command.startswith("close "):
            receiver.close_lease(command.removeprefix("close "))
        elif command == "memcpy":
            ctypes.memmove(address(pool.buffer), address(source), TOTAL_BYTES)
        elif command == "stream":
            pipe.send("ready")
            receive_stream(stream, pool.buffer)
        else:
            receiver.open(command, range(pool.num_blocks))
        pipe.send("done")
    receiver.close()


def receive_stream(stream: socket.socket, buffer: memoryview) -> None:
    received = 0
    while received < TOTAL_BYTES:
        received += stream.recv_into(buffer[received : received + CHUNK_BYTES])


class Bench:
    """The sending process, with its peer."""

    def __init__(self, block_bytes: int) -> None:
        self.pool = make_pool(TOTAL_BYTES, block_bytes)
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=receiving_side, args=(theirs, block_bytes), daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.send(self.pool.memory_fd)
        offers, raw_address = self.pipe.recv()
        self.peer = PeerAddress(worker_id="decode", incarnation="1", control="-", offers=offers)
        self.stream = TcpTransport().connect(raw_address)
        self.stream.setblocking(True)
        self.woken = threading.Event()
        self.senders = {
            name: Sender(
                self.pool,
                key=KEY,
                worker_id=f"prefill-{name}",
                incarnation="1",
                transports=open_transports([name], self.pool, "prefill"),
                on_event=self.woken.set,
            )
            for name in ("shm", "tcp")
        }
        self.blocks = list(range(self.pool.num_blocks))
        random.Random(0).shuffle(self.blocks)
        self.num_leases = 0

    def close(self) -> None:
        for sender in self.senders.values():
            sender.close()
        self.stream.close()
        self.pipe.close()
        self.process.join(10)

    def ask(self, command: str) -> None:
        self.pipe.send(command)
        self.pipe.recv()

    def memcpy(self) -> float:
        started = time.perf_counter()
        self.ask("memcpy")
        return time.perf_counter() - started

    def raw_stream(self) -> float:
        self.ask("stream")
        started = time.perf_counter()
        self.stream.sendall(self.pool.buffer[:TOTAL_BYTES])
        self.pipe.recv()
        return time.perf_counter() - started

    def transfer(self, transport: str) -> float:
        self.num_leases += 1
        lease_id = f"{transport}-{self.num_leases}"
        self.ask(lease_id)
        seconds = self.push(self.senders[transport], lease_id)
        self.ask(f"close {lease_id}")
        return seconds

    def push(self, sender: Sender, lease_id: str) -> float:
        started = time.perf_counter()
        sender.push(self.peer, lease_id, self.blocks, 0, final=True)
        while True:
            self.woken.wait()
            self.woken.clear()
            for event in sender.poll():
                if isinstance(event, Failed):
                    raise RuntimeError(event.reason)
                if isinstance(event, Completed):
                    return time.perf_counter() - started


def measure(block_bytes: int, repeats: int) -> None:
    bench = Bench(block_bytes)
    pairs = {
        "shm": (bench.memcpy, lambda: bench.transfer("shm")),
        "tcp": (bench.raw_stream, lambda: bench.transfer("tcp")),
    }
    try:
        for transport, (raw, ours) in pairs.items():
            raw(), ours()
            times = [(raw(), ours()) for _ in range(repeats)]
            raw_rate, our_rate = (
                statistics.median(TOTAL_BYTES / 1e9 / seconds for seconds in column)
                for column in zip(*times, strict=True)
            )
            ratio = statistics.median(theirs / mine for theirs, mine in times)
            print(
                f"{transport:9} {block_bytes / 1024:9.0f} {our_rate:10.2f} {raw_rate:10.2f} {ratio:8.2f}",
                flush=True,
            )
    finally:
        bench.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print(f"{'transport':9} {'KiB/block':>9} {'GB/s':>10} {'raw GB/s':>10} {'ratio':>8}")
    for block_bytes in BLOCK_BYTES:
        measure(block_bytes, arguments.repeats)


if __name__ == "__main__":
    main()
