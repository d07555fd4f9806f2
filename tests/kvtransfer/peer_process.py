"""A receiver or a sender in a process of its own, to be killed or frozen."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.connection import Connection
from typing import Any

from protocol.peers import PeerAddress
from tests.kvtransfer.signals import send_signal
from tests.kvtransfer.transfer_sides import WAIT_S, ReceiverEnd, SenderEnd, make_pool

NUM_BLOCKS = 64
BLOCK_BYTES = 256 * 1024

_processes = multiprocessing.get_context("forkserver")


def receive(pipe: Connection, transports: list[str]) -> None:
    """Opens the leases that it is told to, and answers "pool" with the bytes there."""
    receiver = ReceiverEnd(transports, make_pool(NUM_BLOCKS, BLOCK_BYTES, seed=2))
    pipe.send(receiver.peer)
    while True:
        command, *arguments = pipe.recv()
        if command == "open":
            receiver.open(*arguments)
            pipe.send("opened")
        elif command == "pool":
            pipe.send(bytes(receiver.pool.buffer))


def send(pipe: Connection, transports: list[str]) -> None:
    """Pushes the whole pool under a lease again and again, without end."""
    sender = SenderEnd(transports, make_pool(NUM_BLOCKS, BLOCK_BYTES, seed=1))
    peer: PeerAddress
    peer, lease_id = pipe.recv()
    while True:
        sender.push(peer, lease_id, range(NUM_BLOCKS), final=False)
        sender.wait_for(lambda event: True)


class PeerProcess:
    """One of the functions above in a process of its own, with a pipe to it."""

    def __init__(self, target: Any, transports: list[str]) -> None:
        self.pipe, theirs = _processes.Pipe()
        self._process = _processes.Process(target=target, args=(theirs, transports), daemon=True)
        self._process.start()
        theirs.close()

    def recv(self) -> Any:
        assert self.pipe.poll(WAIT_S), "the peer process does not answer"
        return self.pipe.recv()

    def ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        send_signal(self._process.pid, number)

    def close(self) -> None:
        if self.pipe.closed:
            return
        self._process.kill()
        self._process.join(WAIT_S)
        self.pipe.close()
