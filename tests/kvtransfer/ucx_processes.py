"""Controls senders and receivers over `ucx` in separate processes: commands, kills, freezes, leftovers."""

from __future__ import annotations

import hashlib
import select
import signal
import threading
import time
from typing import Any

import pytest

from bench.transfer.process import ProcessObject
from tests.faults.leftovers import held, more_than
from tests.kvtransfer.ucx_tls import on_this_host
from tests.processes import send_signal

WAIT_S = 30.0


def hello_of(num_blocks: int, block_bytes: int) -> Any:
    from kvtransfer.messages import WIRE_VERSION, Hello

    return Hello(
        version=WIRE_VERSION,
        nonce=bytes(32),
        transport="ucx",
        worker_id="sender",
        incarnation="1",
        receiver_incarnation="1",
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        segments=[],
        wire=[],
    )


def digest(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Side:
    """The commands of both kinds of process."""

    def __init__(self, num_blocks: int, block_bytes: int, seed: int) -> None:
        from messaging.wake import Wake
        from tests.kvtransfer.transfer_sides import make_pool

        self.wake = Wake()
        self.channels: list[Any] = []
        self.pool = make_pool(num_blocks, block_bytes, seed)
        self.before = held()
        self.open()

    def open(self) -> None:
        from kvtransfer.transports.ucx import UcxTransport

        self.transport = UcxTransport(self.pool, type(self).__name__)

    def left_after_close(self) -> dict[str, int]:
        """Close, and return what was not there before the transport was opened."""
        self.transport.close()
        self.transport.close()
        for channel in self.channels:
            channel.close()
        return more_than(self.before)

    def attempt(self, command: str, *arguments: Any) -> tuple[Any, Exception | None]:
        """Return the value of a command, or its exception."""
        try:
            return getattr(self, command)(*arguments), None
        except Exception as error:
            return None, error

    def digest(self) -> str:
        return digest(self.pool.buffer)

    def first_bytes(self) -> bytes:
        return bytes(self.pool.buffer[:32])

    def cpu_seconds(self) -> float:
        return time.process_time()

    def block_digests(self) -> list[str]:
        size = self.pool.block_bytes
        return [digest(self.pool.buffer[at : at + size]) for at in range(0, self.pool.nbytes, size)]


class Sender(Side):
    """Connects to receivers and offers its pool to them."""

    def connect(self, address: str) -> None:
        from kvtransfer.messages import Channel

        deadline = time.monotonic() + WAIT_S
        self.outgoing = Channel(self.transport.connect(address), self.wake, WAIT_S)
        self.channels.append(self.outgoing)
        self.outgoing.finish_connect(deadline)
        self.transport.writer(self.outgoing, self.pool, deadline)

    def hang_up(self) -> None:
        self.outgoing.close()


class Receiver(Sender):
    """Reads from the sender that connected last, on a thread, under one gate."""

    def open(self) -> None:
        from kvtransfer.lease import WriteGate

        super().open()
        self.listener, self.address = self.transport.listen("127.0.0.1")
        self.emptied = threading.Event()
        self.gate = WriteGate(self.emptied.set)
        self.reading: threading.Thread | None = None

    def listen(self) -> str:
        return self.address

    def accept(self) -> None:
        """Take the next connection, on which the sender has introduced itself."""
        from kvtransfer.messages import Channel

        self.listener.settimeout(WAIT_S)
        accepted, _ = self.listener.accept()
        self.channel = Channel(accepted, self.wake, WAIT_S)
        self.channels.append(self.channel)
        self.channel.ready(select.POLLIN, time.monotonic() + WAIT_S)

    def set_up(self, num_blocks: int, timeout_s: float, read_s: float = WAIT_S) -> float:
        """Set up a reader and return the seconds that it took. Each read has a time limit of `read_s`."""
        hello = hello_of(num_blocks, self.pool.block_bytes)
        started = time.monotonic()
        deadline = started + timeout_s
        try:
            self.channel.progress_timeout_s = read_s
            self.reader = self.transport.reader(self.channel, self.pool, hello, deadline)
        except Exception:
            self.channel.close()
            raise
        return time.monotonic() - started

    def begin(self, runs: list[tuple[int, int, int]], repeat: bool = False, gated: bool = True) -> None:
        from kvtransfer.blocks.extents import from_wire
        from kvtransfer.lease import WriteGate
        from tests.kvtransfer.test_leases import runs as on_the_wire

        sources, targets = from_wire(on_the_wire(*runs), 2**31, 2**31)
        gate = self.gate
        if not gated:
            gate = WriteGate()
            gate.close()

        def read() -> None:
            started = time.monotonic()
            try:
                outcome: Any = self.reader.read(sources, targets, gate)
                while repeat and outcome is True:
                    outcome = self.reader.read(sources, targets, gate)
            except Exception as error:
                outcome = error
            self.outcome = outcome, time.monotonic() - started

        self.reading = threading.Thread(target=read)
        self.reading.start()

    def end(self) -> tuple[Any, float]:
        """Return the running read's result or exception, and its seconds."""
        assert self.reading is not None
        self.reading.join(WAIT_S)
        assert not self.reading.is_alive(), "the read does not end"
        return self.outcome

    def read(self, runs: list[tuple[int, int, int]], gated: bool = True) -> Any:
        self.begin(runs, gated=gated)
        outcome, _ = self.end()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close_reader(self) -> None:
        self.reader.close()
        self.channel.close()

    def keep_reader(self) -> None:
        """Set the reader aside. The next one will be used."""
        self.kept = self.reader, self.channel

    def close_kept_reader(self) -> None:
        for thing in self.kept:
            thing.close()

    def metadata_of_another_agent(self) -> bytes:
        from kvtransfer.transports.ucx_agent import Agent

        self.other = Agent("other")
        return self.other.metadata()

    def connect_agent(self, name: str, metadata: bytes) -> None:
        from kvtransfer.transports.ucx_agent import Agent

        agent = Agent("tester")
        try:
            agent.connect(name, metadata)
        finally:
            agent.close()

    def connect_after_a_loss(self) -> None:
        """Connect as after a failed read, while other reads from the same sender are still running."""
        remote = self.reader._remote
        remote.lost = True
        self.reader._agent.connect(remote.name, remote.metadata)

    def close_gate(self) -> bool:
        return self.gate.close()

    def reopen_gate(self) -> None:
        from kvtransfer.lease import WriteGate

        self.gate = WriteGate(self.emptied.set)

    def gate_emptied(self, timeout_s: float) -> bool:
        return self.emptied.wait(timeout_s)

    def stop(self) -> None:
        self.wake.stop()

    def num_orphaned_reads(self) -> int:
        return len(self.transport._orphans)

    def left_after_close(self) -> dict[str, int]:
        self.listener.close()
        return super().left_after_close()


class Process(ProcessObject):
    """A `Side` in a separate process. `emulate` also allows reads over TCP."""

    def __init__(
        self,
        kind: type[Side],
        tls: str,
        *,
        num_blocks: int = 64,
        block_bytes: int = 65536,
        seed: int = 0,
        emulate: bool = True,
    ) -> None:
        # UCX would use any device, even one that a test of networks removes meanwhile.
        environment = {"UCX_TLS": on_this_host(tls), "UCX_NET_DEVICES": "lo"}
        if emulate:
            environment["UCX_PROTO_EMULATION_ENABLE"] = "y"
        super().__init__(kind, num_blocks, block_bytes, seed, environment=environment)

    def tell(self, command: str, *arguments: Any) -> None:
        self.begin("attempt", command, *arguments)

    def ask(self, command: str, *arguments: Any) -> Any:
        self.tell(command, *arguments)
        return self.answer()

    def answer(self) -> Any:
        value, error = self.end()
        if error is not None:
            raise error
        return value

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        send_signal(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)

    def close(self) -> None:
        self.kill()
        super().close()


def join(sender: Process, receiver: Process, num_blocks: int = 64, read_s: float = WAIT_S) -> float:
    """Connect the two. Return the receiver's seconds. Each of its reads has a limit of `read_s`."""
    sender.tell("connect", receiver.ask("listen"))
    receiver.ask("accept")
    try:
        seconds = receiver.ask("set_up", num_blocks, WAIT_S, read_s)
    except Exception:
        with pytest.raises(OSError):
            sender.answer()
        raise
    sender.answer()
    return float(seconds)
