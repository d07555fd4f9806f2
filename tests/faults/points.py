"""Names points of the transfer protocol, calls of the product's methods, at which tests strike a process."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from kvtransfer.messages import Ack

Action = Literal["KILL", "STOP", "HOLD", "CUT"]
"""A signal to the process itself; wait for the test's permission; break every connection."""


@dataclass(frozen=True)
class Point:
    """A point before or after those calls of a method whose arguments (and result) `applies` accepts."""

    owner: str
    method: str
    when: Literal["before", "after"]
    applies: Callable[..., bool] = lambda *arguments: True


def _begins(stream: Any, channel: Any, writer: Any, transmission: Any) -> bool:
    return transmission.rest.done == 0


def _is_partial(stream: Any, channel: Any, writer: Any, transmission: Any, result: bool) -> bool:
    return result and transmission.rest.remaining > 0


def _is_whole(stream: Any, channel: Any, writer: Any, transmission: Any, result: bool) -> bool:
    return transmission.rest.remaining == 0


def _acks(channel: Any, message: Any, *rest: Any) -> bool:
    return isinstance(message, Ack)


SENDER_POINTS = {
    "connecting": Point("kvtransfer.streams.stream:Stream", "open", "before"),
    "connected": Point("kvtransfer.messages:Channel", "finish_connect", "after"),
    "hello sent": Point("kvtransfer.messages:Channel", "recv_frame", "before"),
    "challenge received": Point("kvtransfer.messages:Channel", "recv_frame", "after"),
    "verdict received": Point("kvtransfer.streams.stream", "introduce", "after"),
    "link ready": Point("kvtransfer.streams.stream:Stream", "open", "after"),
    "piece taken": Point(
        "kvtransfer.streams.stream:Stream",
        "_take",
        "after",
        lambda stream, writer, result: result is not None,
    ),
    "piece begins": Point("kvtransfer.streams.stream:Stream", "_write", "before", _begins),
    "mid payload": Point("kvtransfer.streams.stream:Stream", "_write", "after", _is_partial),
    "piece sent": Point("kvtransfer.streams.stream:Stream", "_write", "after", _is_whole),
    "ack arrives": Point("kvtransfer.streams.stream:Stream", "_read_acks", "before"),
    "ack read": Point("kvtransfer.sender:Sender", "_acknowledged", "after"),
    "final push": Point(
        "kvtransfer.streams.link:Link", "enqueue", "after", lambda link, piece, result: piece.final
    ),
    "completed": Point("kvtransfer.sender:Sender", "_completed", "after"),
}

RECEIVER_POINTS = {
    "accepted": Point("kvtransfer.streams.connection:ReceiverConnection", "run", "before"),
    "hello received": Point("kvtransfer.messages:Channel", "send_all", "before"),
    "challenge sent": Point("kvtransfer.messages:Channel", "send_all", "after"),
    "verdict sent": Point("kvtransfer.streams.connection", "examine", "after"),
    "reader ready": Point("kvtransfer.lease:LeaseTable", "connected", "after"),
    "piece announced": Point("kvtransfer.lease:LeaseTable", "admit", "before"),
    "piece admitted": Point("kvtransfer.lease:LeaseTable", "admit", "after"),
    "mid copy": Point("kvtransfer.transports.shm:Gather", "copy", "before"),
    "mid receive": Point("kvtransfer.transports.tcp:TcpReader", "_receive", "before"),
    "mid read": Point("kvtransfer.transports.ucx_reader:UcxReader", "_wait", "before"),
    "blocks read": Point("kvtransfer.transports.ucx_reader:UcxReader", "_confirm", "before"),
    "confirmed": Point("kvtransfer.transports.ucx_reader:UcxReader", "_confirm", "after"),
    "converting": Point("kvtransfer.blocks.convert:Converter", "place", "before"),
    "converted": Point("kvtransfer.blocks.convert:Converter", "place", "after"),
    "in place": Point("kvtransfer.streams.connection:ReceiverConnection", "_take", "after"),
    "ack due": Point("kvtransfer.messages:Channel", "send", "before", _acks),
    "ack sent": Point("kvtransfer.messages:Channel", "send", "after", _acks),
    "recorded": Point("kvtransfer.lease:LeaseTable", "record", "after"),
    "told": Point("kvtransfer.receiver:Receiver", "_emit", "after"),
    "closing": Point("kvtransfer.lease:LeaseTable", "close", "before"),
    "closed": Point("kvtransfer.lease:LeaseTable", "close", "after"),
}

CONNECTING = {
    "connecting", "connected", "hello sent", "challenge received", "verdict received", "link ready",
    "accepted", "hello received", "challenge sent", "verdict sent", "reader ready",
}  # fmt: skip
"""The points that a pair passes only while it connects."""
CONVERTING = ("converting", "converted")
"""The points that only pieces of an unlike pool pass: blocks of another dtype, through a staging area."""
ONLY_OVER = {
    "mid payload": "tcp",
    "mid copy": "shm",
    "mid receive": "tcp",
    "mid read": "ucx",
    "blocks read": "ucx",
    "confirmed": "ucx",
}
"""The points that only one transport passes."""


def points_over(points: dict[str, Point], transport: str) -> list[str]:
    """Return the names of the points that this transport passes."""
    ours = [name for name in points if name not in CONVERTING]
    return [name for name in ours if ONLY_OVER.get(name, transport) == transport]


@dataclass
class Fault:
    """An action at the `left`-th passage of a point. A held or frozen process continues after `seconds`."""

    point: str
    action: Action
    left: int = 1
    seconds: float | None = None
    """None: the test decides when to continue, if ever."""


class FaultPoints:
    """This process's faults. `report` tells where it is held or frozen, and lets it go on."""

    def __init__(self, points: dict[str, Point], report: Connection, cut: Callable[[], None]) -> None:
        self._report = report
        self._cut = cut
        self._lock = threading.Lock()
        self._holding = threading.Lock()
        self._faults: list[Fault] = []
        wrapped: dict[tuple[str, str], dict[str, Point]] = {}
        for name, point in points.items():
            wrapped.setdefault((point.owner, point.method), {})[name] = point
        for (owner, method), there in wrapped.items():
            self._wrap(owner, method, there)

    def arm(self, faults: list[Fault]) -> None:
        """Replace the armed faults by these."""
        with self._lock:
            self._faults = faults

    def _wrap(self, owner: str, method: str, points: dict[str, Point]) -> None:
        module, _, kind = owner.partition(":")
        holder = importlib.import_module(module)
        if kind:
            holder = getattr(holder, kind)
        original = getattr(holder, method)

        @functools.wraps(original)
        def call(*arguments: Any) -> Any:
            for name, point in points.items():
                if point.when == "before" and point.applies(*arguments):
                    self._pass(name)
            result = original(*arguments)
            for name, point in points.items():
                if point.when == "after" and point.applies(*arguments, result):
                    self._pass(name)
            return result

        setattr(holder, method, call)

    def _pass(self, name: str) -> None:
        with self._lock:
            due = []
            for fault in self._faults:
                if fault.point == name:
                    fault.left -= 1
                    if fault.left == 0:
                        due.append(fault)
        for fault in due:
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        match fault.action:
            case "KILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "STOP":
                self._report.send((fault.point, fault.action))
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread does not continue
            case "HOLD":
                with self._holding:
                    self._report.send((fault.point, fault.action))
                    self._report.recv()
            case "CUT":
                self._cut()
