"""A router's process: serves, reports to the launcher, and ends with it.

python -m deploy.routers.process FD     FD: the control socket to the launcher
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import socket
import sys
from collections import defaultdict, deque
from typing import TypeVar

import msgspec

from deploy.routers import messages
from native.heap import freeze_heap
from protocol.errors import ProtocolError, TandemError
from protocol.logs import log_to_stderr
from router.scaling.interface import ScaleAnswer
from router.server import RouterServer

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25

T = TypeVar("T")


class _Control:
    """A router's connection to the launcher, on the router's event loop."""

    def __init__(self, control: socket.socket, server: RouterServer) -> None:
        self._control = control
        self._server = server
        self._leaving: defaultdict[str, deque[asyncio.Future[str]]] = defaultdict(deque)
        self._scaling: deque[asyncio.Future[ScaleAnswer]] = deque()
        self._beginning: deque[asyncio.Future[str]] = deque()
        server.state.scaler.ask = lambda request: self._ask(self._scaling, messages.Scales(request))
        server.state.autoscaler.log.publish = lambda event: self._send(messages.AutoscalerEvent(event))
        server.state.adapters.publish = lambda name, adapter: self._send(
            messages.AdapterChange(name, adapter)
        )
        server.state.turns.begin = lambda change: self._ask(self._beginning, messages.ChangeRequest(change))
        server.state.turns.end = lambda change: self._send(messages.ChangeEnd(change))
        drainer = server.state.drainer
        drainer.let_go = lambda worker_id, for_good: self._ask(
            self._leaving[worker_id], messages.LeaveRequest(worker_id, for_good)
        )
        drainer.renew = lambda *renewed: self._send(messages.RoleChange(*renewed))

    def attach(self) -> None:
        """Begin to read and report. Call it once HTTP is served."""
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._read)
        self._report()

    def _report(self) -> None:
        workers = {
            worker.key.worker_id: messages.KnownWorker(
                worker.key.incarnation, worker.silence_s, dict(worker.start_up)
            )
            for worker in self._server.state.registry
        }
        self._send(messages.RouterReport(workers, self._server.state.placer.meter.demand))
        asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._report)

    async def _ask(self, waiting: deque[asyncio.Future[T]], message: messages.FromRouter) -> T:
        """Ask the launcher. Answers of one type come in the order of their questions."""
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiting.append(answer)
        self._send(message)
        return await answer

    def _send(self, message: messages.FromRouter) -> None:
        with contextlib.suppress(OSError):  # if the launcher has ended, the next read shows it
            self._control.send(msgspec.msgpack.encode(message))

    def _read(self) -> None:
        try:
            data = self._control.recv(messages.MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            for _ in range(2):
                self._server.stop()  # the launcher has ended, and its workers end too
            return
        try:
            message = messages.to_router.decode(data)
        except ProtocolError as error:
            log.error("dropped a message of the launcher: %s", error)
            return
        match message:
            case messages.WorkerDied(worker_id, incarnation, reason):
                self._server.mark_dead(worker_id, incarnation, reason)
            case messages.Expect(roles, room):
                self._server.expect(roles, room)
            case messages.OtherDemand(demand):
                self._server.state.autoscaler.step(demand)
            case messages.LeaveAnswer(worker_id, refusal):
                _answer(self._leaving[worker_id], refusal)
            case messages.Scaled(answer):
                _answer(self._scaling, answer)
            case messages.ChangeAnswer(refusal):
                _answer(self._beginning, refusal)
            case messages.AutoscalerEvent(event):
                self._server.state.autoscaler.log.note(event)
            case messages.AdapterChange(name, adapter):
                self._server.state.adapters.apply(name, adapter)
            case messages.GaveUp(worker_id, reason):
                self._server.gave_up(worker_id, reason)
            case messages.Replaced(process):
                self._server.replaced(process)
            case messages.StopRouter():
                self._server.stop()


def _answer(waiting: deque[asyncio.Future[T]], answer: T) -> None:
    """Answer the first waiting request, unless it was cancelled."""
    if waiting and not (first := waiting.popleft()).done():
        first.set_result(answer)


def main(fd: int) -> None:
    faulthandler.enable()
    control = socket.socket(fileno=fd)
    start = msgspec.msgpack.decode(control.recv(messages.MAX_MESSAGE_BYTES), type=messages.StartRouter)
    log_to_stderr(start.config.log_level, start.config.log_format, start.place.router_id)
    try:
        server = RouterServer(start.config, start.keys, start.link_host, start.place)
    except TandemError as error:
        control.send(msgspec.msgpack.encode(messages.CannotStart(str(error))))
        return
    freeze_heap()
    server.run(on_start=_Control(control, server).attach)


if __name__ == "__main__":
    main(int(sys.argv[1]))
