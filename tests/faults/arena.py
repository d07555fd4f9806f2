"""What every scenario does: get two processes, make requests, let faults happen, and look at what is left."""

from __future__ import annotations

import importlib.util
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from protocol.messages import PeerAddress
from tests.faults.points import Action, Fault, Point, points_over
from tests.faults.proxy import Damage, Proxy
from tests.faults.sides import CLOSED_EARLY, Options, Outcome, serve

ANSWER_S = 30.0
DEADLINE_S = 6.0
"""What a request may take; an end that is told of a failure must end it long before."""

ORPHAN_S = 0.8
"""After which a lease is given up under which nobody has sent anything."""

UCX_CONNECT_S = 2.0
"""Its first contact takes longer than the others'."""

SMALL = (96, 16 * 1024)
LARGE = (96, 256 * 1024)
"""Pools: blocks, and bytes of each. A large one's pieces are more than a socket's buffers hold."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.worker.child", "tests.faults.sides"])
_starting = threading.Lock()
"""`multiprocessing` looks after its processes whenever one is started, in whatever thread."""
_numbers = itertools.count()


needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")


def cases(points: dict[str, Point], ucx: Sequence[str] = ()) -> list[Any]:
    """Parameters (point, transport): all that `tcp` and `shm` pass, and a choice of those of `ucx`."""
    everywhere = [
        pytest.param(name, transport, id=f"{name}, {transport}")
        for transport in ("tcp", "shm")
        for name in points_over(points, transport)
    ]
    return everywhere + [pytest.param(name, "ucx", id=f"{name}, ucx", marks=needs_nixl) for name in ucx]


class Died(Exception):
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
        """To a command that it was frozen at."""
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
            raise Died from error

    def answer(self) -> Any:
        deadline = time.monotonic() + ANSWER_S
        while not self._commands.poll(0.05):
            if self.frozen:
                raise Died
            assert time.monotonic() < deadline, f"{self.worker_id} does not answer"
        try:
            good, value = self._commands.recv()
        except (EOFError, OSError) as error:
            raise Died from error
        assert good, value
        return value

    def ask(self, command: str, *arguments: Any) -> Any:
        self.tell(command, *arguments)
        return self.answer()

    def arm(self, point: str, action: Action, nth: int = 1) -> None:
        self.ask("arm", [Fault(point, action, nth)])

    def wait_at(self, point: str) -> None:
        """Until it is held at a point, or frozen there, or was killed."""
        assert self._report.poll(ANSWER_S), f"{self.worker_id} never came to {point!r}"
        try:
            assert self._report.recv()[0] == point
        except (EOFError, OSError):
            self.join()

    def go_on(self) -> None:
        """From where it is held."""
        self._report.send("go on")

    def await_frozen(self, for_good: bool = True) -> None:
        """For all that the test knows `for_good`."""
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
    """Lets a process go on from where its faults hold or freeze it, when their time is over."""

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
    """Processes that are ready for the next scenario. For use from every thread."""

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


@dataclass
class Request:
    """One lease between two processes; `outcomes` by role once it is over."""

    lease_id: str
    seed: int
    sender: Child
    receiver: Child
    count: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def sent(self) -> str:
        """How it ended for the sender; empty if that one can't tell."""
        return self.outcomes.get("sender", ("", ""))[0]

    @property
    def received(self) -> str:
        return self.outcomes.get("receiver", ("", ""))[0]

    @property
    def reasons(self) -> str:
        return "; ".join(reason for _, reason in self.outcomes.values())


class Arena:
    """The processes, proxies and requests of one scenario."""

    def __init__(self, stock: Stock, transports: tuple[str, ...] = ("tcp",)) -> None:
        self.transports = transports
        self.requests: list[Request] = []
        self._proxies: list[Proxy] = []
        self._stock = stock
        self._children: list[Child] = []
        self._segments = shared_segments()

    # --- setting up -------------------------------------------------------------------------------

    def sender(self, worker_id: str = "prefill-0", **options: Any) -> Child:
        return self._open("sender", worker_id, **options)

    def receiver(self, worker_id: str = "decode-0", **options: Any) -> Child:
        return self._open("receiver", worker_id, **options)

    def _open(
        self,
        role: Literal["sender", "receiver"],
        worker_id: str,
        size: tuple[int, int] = SMALL,
        network: str = "",
        tls: str = "cma,tcp",
        **options: Any,
    ) -> Child:
        transports = options.pop("transports", self.transports)
        if "ucx" in transports:
            options.setdefault("connect_timeout_s", UCX_CONNECT_S)
        child = self._stock.take(size, network, tls)
        self._children.append(child)
        child.open(role, Options(worker_id, transports, **options))
        return child

    def proxy(self, receiver: Child, *damages: Damage, transport: str = "tcp") -> tuple[Proxy, PeerAddress]:
        """A proxy in front of one of the receiver's transports, and the address that leads through it."""
        offers = list(receiver.peer.offers)
        index = next(i for i, offer in enumerate(offers) if offer.transport == transport)
        proxy = Proxy(offers[index].address, list(damages))
        self._proxies.append(proxy)
        offers[index] = msgspec.structs.replace(offers[index], address=proxy.address)
        return proxy, msgspec.structs.replace(receiver.peer, offers=offers)

    def drop(self, proxy: Proxy) -> None:
        proxy.close()
        self._proxies.remove(proxy)

    # --- requests ---------------------------------------------------------------------------------

    def reserve(self, sender: Child, receiver: Child, count: int = 24, lease_id: str = "") -> Request:
        """Blocks for a request; one that is refused has its outcome at once."""
        seed = next(_numbers)
        request = Request(lease_id or f"lease-{seed:06}", seed, sender, receiver, count)
        self.requests.append(request)
        refusal = receiver.ask("reserve", request.lease_id, request.seed, count)
        if refusal:
            request.outcomes = {"receiver": ("failed", refusal)}
        return request

    def again(self, request: Request, sender: Child) -> Request:
        """The same lease, but another sender."""
        again = Request(request.lease_id, request.seed, sender, request.receiver, request.count)
        again.outcomes = {"receiver": ("failed", "it is the other one's")}
        return again

    def push(
        self,
        request: Request,
        peer: PeerAddress | None = None,
        chunk: int = 6,
        first: int = 0,
        until: int | None = None,
        wait: bool = True,
    ) -> None:
        """The blocks [first, until) in chunks; the request's last block is the final one.

        Without `wait`, `pushed` is to be called.
        """
        end = request.count if until is None else until
        chunks = [min(chunk, end - start) for start in range(first, end, chunk)]
        where = peer or request.receiver.peer
        command = "push", where, request.lease_id, request.seed, chunks, first, end == request.count
        if self._or_dies(request.sender, tell=command) and wait:
            self.pushed(request)

    def pushed(self, request: Request) -> None:
        self._or_dies(request.sender)

    def push_and_freeze(self, request: Request, point: str) -> None:
        """Push, the sender being about to freeze at a point. It answers when it has woken up."""
        self.push(request, wait=False)
        request.sender.wait_at(point)
        request.sender.await_frozen()
        request.sender.owes_answer = True

    def begin(self, sender: Child, receiver: Child, count: int = 24, **how: Any) -> Request:
        request = self.reserve(sender, receiver, count)
        if not request.outcomes:
            self.push(request, **how)
        return request

    def serve(self, sender: Child, receiver: Child, count: int = 24, **how: Any) -> Request:
        """A request that nothing may happen to."""
        request = self.begin(sender, receiver, count, **how)
        self.finish(request)
        assert (request.sent, request.received) == ("completed", "completed"), request.outcomes
        return request

    def finish(
        self, *requests: Request, deadline_s: float = DEADLINE_S, of: str = "", allow_corrupt: bool = False
    ) -> None:
        """Wait for the ends of requests, on those of their sides that live, and check them.

        `of`: of one side alone. `allow_corrupt`: nobody has looked at checksums.
        """
        asked: dict[Child, list[Request]] = {}
        for request in requests:
            for child in (request.sender, request.receiver):
                if child.role not in request.outcomes and of in ("", child.role):
                    asked.setdefault(child, []).append(request)
        began = time.monotonic()
        waiting = [child for child in asked if not child.frozen and self._or_dies(child, tell=(
            "results", [request.lease_id for request in asked[child]], deadline_s
        ))]
        for child in waiting:
            try:
                outcomes = child.answer()
            except Died:
                continue
            for request in asked[child]:
                request.outcomes[child.role] = outcomes[request.lease_id]
        assert time.monotonic() - began < deadline_s + 2, "the ends of the requests came too late"
        for request in requests:
            _check(request, allow_corrupt)

    @staticmethod
    def _or_dies(child: Child, tell: tuple[Any, ...] = ()) -> bool:
        """Send a command, or else take the answer to one; whether the child lives still."""
        try:
            child.tell(*tell) if tell else child.answer()
        except Died:
            if not child.frozen:
                child.join()
            return False
        return True

    # --- afterwards -------------------------------------------------------------------------------

    def check(self, *survivors: Child) -> None:
        """Nothing is left of the requests, the survivors serve the next one, and then nothing is left of it."""
        for child in survivors:
            assert child.alive, f"{child.worker_id} died"
            self._expect_nothing(child, "problems")
        self._serve_next(*survivors)
        for child in self._children:
            if child not in survivors:
                self._part_with(child)
        senders = [child for child in survivors if child.role == "sender"]
        receivers = [child for child in survivors if child.role == "receiver"]
        for first, others in ((senders, receivers), (receivers, senders)):
            for child in first:
                self._expect_nothing(child, "shut")
                child.role = ""
            for child in others:
                if child.role:
                    self._expect_nothing(child, "left")
        deadline = time.monotonic() + 5
        while left := orphaned_segments(self._segments):
            assert time.monotonic() < deadline, left

    def _serve_next(self, *survivors: Child) -> None:
        """Pairs of survivors serve each other; one without a fellow gets a fresh one."""
        senders = [child for child in survivors if child.role == "sender"]
        receivers = [child for child in survivors if child.role == "receiver"]
        own = dict(size=survivors[0].size, tls=survivors[0].tls, network=survivors[0].network)
        if not senders:
            senders = [self.sender("prefill-fresh", **own)]
        if not receivers:
            receivers = [self.receiver("decode-fresh", **own)]
        for sender in senders:
            for receiver in receivers:
                self.serve(sender, receiver, 8, chunk=4)
                for child in (sender, receiver):
                    self._expect_nothing(child, "problems")

    def _part_with(self, child: Child) -> None:
        """A process that is no survivor. A frozen one holds its connections until somebody kills it."""
        if child.frozen:
            child.kill()
        elif child.alive and child.role:
            self._expect_nothing(child, "shut")
            child.role = ""

    @staticmethod
    def _expect_nothing(child: Child, of: str) -> None:
        found = child.ask(of)
        assert not found, "\n".join([f"{of} of {child.worker_id}: {found}", *child.ask("log")])

    def close(self) -> None:
        for proxy in self._proxies:
            proxy.close()
        for child in self._children:
            if child.alive and not child.frozen and not child.role:
                self._stock.give(child)
            else:
                child.dispose()


def _check(request: Request, allow_corrupt: bool) -> None:
    """Of each side that lives: the right bytes, or one clear error in time. And they agree."""
    for role, (status, reason) in request.outcomes.items():
        assert status in ("completed", "failed", "expired") or allow_corrupt, (role, status, reason, request)
        assert status == "completed" or reason, (role, request)
    if request.sent == "completed" and request.received and not allow_corrupt:
        assert request.received == "completed" or CLOSED_EARLY in request.reasons, request


def shared_segments() -> set[str]:
    """Names of shared memory that a transfer might leave behind."""
    files = {name for name in os.listdir("/dev/shm") if name.startswith(("ucx", "nixl", "tandem"))}
    table = Path("/proc/sysvipc/shm")
    rows = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
    return files | {f"SYSV {row[1]}" for row in rows}


def orphaned_segments(before: set[str]) -> set[str]:
    """New shared memory that no living process has mapped."""
    new = shared_segments() - before
    if not new:
        return set()
    mapped = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
        except OSError:
            continue
        mapped |= {line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}
        mapped |= {f"SYSV {line.split()[4]}" for line in lines if "/SYSV" in line}
    return new - mapped
