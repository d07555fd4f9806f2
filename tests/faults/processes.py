"""Controls the fault harness's processes: sends commands, takes answers, kills, freezes and reuses them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from protocol.ids import PeerAddress
from tests.faults.points import Action, Fault
from tests.faults.sides import Options, serve

ANSWER_S = 30.0
SMALL = (96, 16 * 1024)
LARGE = (96, 256 * 1024)
"""Pools: number of blocks, and bytes of each. Pieces of a large pool exceed a socket's buffers."""

_processes = multiprocessing.get_context("forkserver")
_starting = threading.Lock()
"""`multiprocessing` checks on its processes whenever one is started, in any thread."""


class DiedError(Exception):
    """The process has ended, or is frozen for good."""


class Child:
    """A process with a pool, and in it one end at a time."""

    def __init__(self, size: tuple[int, int] = SMALL, network: str = "", tls: str = "cma,tcp") -> None:
        self._commands, commands = _processes.Pipe()
        self._report, report = _processes.Pipe()
        self.size, self.network, self.tls = size, network, tls
        self.role = ""
        self.worker_id = ""
        self.address: PeerAddress | None = None
        self.frozen = False
        self.owes_answer = False
        """Whether the answer to the command at which it froze is still to come."""
        self._process = _processes.Process(
            target=serve, args=(commands, report, *size, network, tls), daemon=True
        )
        with _starting:
            self._process.start()
        commands.close()
        report.close()
        self.answer()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def peer(self) -> PeerAddress:
        assert self.address is not None
        return self.address

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def open(self, role: Literal["sender", "receiver"], options: Options) -> None:
        self.role, self.worker_id = role, options.worker_id
        self.address = self.ask("open", role, options)

    def tell(self, command: str, *arguments: Any) -> None:
        try:
            self._commands.send((command, arguments))
        except OSError as error:
            raise DiedError from error

    def answer(self) -> Any:
        deadline = time.monotonic() + ANSWER_S
        while not self._commands.poll(0.05):
            if self.frozen:
                raise DiedError
            assert time.monotonic() < deadline, f"{self.worker_id} does not answer"
        try:
            good, value = self._commands.recv()
        except (EOFError, OSError) as error:
            raise DiedError from error
        assert good, value
        return value

    def ask(self, command: str, *arguments: Any) -> Any:
        self.tell(command, *arguments)
        return self.answer()

    def arm(self, point: str, action: Action, nth: int = 1) -> None:
        self.ask("arm", [Fault(point, action, nth)])

    def wait_at(self, point: str) -> None:
        """Wait until the process is held or frozen at a point, or was killed there."""
        assert self._report.poll(ANSWER_S), f"{self.worker_id} never came to {point!r}"
        try:
            assert self._report.recv()[0] == point
        except (EOFError, OSError):
            self.join()

    def go_on(self) -> None:
        """Let a held process continue."""
        self._report.send("go on")

    def await_frozen(self, for_good: bool = True) -> None:
        """Wait until the process is frozen. With `for_good`, the test counts it as dead."""
        deadline = time.monotonic() + ANSWER_S
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"{self.worker_id} is not frozen"
            time.sleep(0.001)
        self.frozen = for_good

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.frozen = False
        if self.owes_answer:
            self.owes_answer = False
            self.answer()

    def kill(self) -> None:
        self._process.kill()
        self.join()

    def join(self) -> None:
        self._process.join(ANSWER_S)
        assert not self._process.is_alive(), f"{self.worker_id} does not die"

    def dispose(self) -> None:
        self.kill()
        with _starting:
            self._process.close()
        self._commands.close()
        self._report.close()


class Keeper(threading.Thread):
    """Lets processes continue after their faults have held or frozen them for the given time."""

    def __init__(self, child: Child, faults: Sequence[Fault]) -> None:
        super().__init__(daemon=True)
        self._child = child
        self._faults = {(fault.point, fault.action): fault for fault in faults}
        self._over = threading.Event()
        child.ask("arm", list(faults))
        self.start()

    def run(self) -> None:
        try:
            while not self._over.is_set():
                if self._child._report.poll(0.02):
                    self._attend(self._faults[self._child._report.recv()])
        except (EOFError, OSError):
            return  # it was killed

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _attend(self, fault: Fault) -> None:
        if fault.action == "STOP":
            self._child.await_frozen(for_good=fault.seconds is None)
        if fault.seconds is not None:
            self._over.wait(fault.seconds)
            self._child.thaw() if fault.action == "STOP" else self._child.go_on()


class Stock:
    """Processes that are ready for the next scenario. Every thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Child] = []

    def take(self, size: tuple[int, int], network: str, tls: str) -> Child:
        with self._lock:
            for child in self._idle:
                if (child.size, child.network, child.tls) == (size, network, tls) and child.alive:
                    self._idle.remove(child)
                    return child
        return Child(size, network, tls)

    def give(self, child: Child) -> None:
        with self._lock:
            self._idle.append(child)

    def close(self) -> None:
        for child in self._idle:
            child.dispose()
