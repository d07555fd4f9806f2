"""A router's process: serves, reports to the launcher, and ends with it.

python -m deploy.routers.process FD     FD: the control socket to the launcher
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import logging
import socket
import sys
from typing import Any

import msgspec

from deploy.routers import calls
from deploy.routers.pool import RouterEnd
from native.process import freeze_heap
from protocol.errors import ProtocolError, TandemError
from protocol.logs import log_to_stderr
from router.server import RouterServer

log = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25


class _Control:
    """A router's connection to the launcher, on the router's event loop."""

    def __init__(self, control: socket.socket, server: RouterServer) -> None:
        self._control = control
        self._server = server
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[asyncio.Future[Any], calls.BoundedDecoder[Any]]] = {}
        state, tell = server.state, self._tell
        self._functions = calls.Functions(
            *(server.mark_dead, server.expect, server.gave_up, server.replaced, server.stop),
            *(state.autoscaler.step, state.autoscaler.log.note, state.adapters.apply),
        )
        state.scaler.ask = lambda request: self._ask(RouterEnd.scale, request)
        state.autoscaler.log.publish = lambda event: tell(calls.call(RouterEnd.note, event))
        state.adapters.publish = lambda name, adapter: tell(calls.call(RouterEnd.apply, name, adapter))
        state.turns.begin = lambda change: self._ask(RouterEnd.begin, change)
        state.turns.end = lambda change: tell(calls.call(RouterEnd.end, change))
        state.drainer.let_go = lambda *asked: self._ask(RouterEnd.let_go, *asked)
        state.drainer.renew = lambda *renewed: tell(calls.call(RouterEnd.renew, *renewed))

    def attach(self) -> None:
        """Begin to read and report. Call it once HTTP is served."""
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._read)
        self._report()

    def _report(self) -> None:
        workers = {
            worker.key.worker_id: calls.KnownWorker(
                worker.key.incarnation, worker.silence_s, dict(worker.start_up)
            )
            for worker in self._server.state.registry
        }
        self._tell(calls.call(RouterEnd.report, workers, self._server.state.placer.meter.demand))
        asyncio.get_running_loop().call_later(REPORT_INTERVAL_S, self._report)

    async def _ask(self, function: Any, *arguments: object) -> Any:
        """Call a function of the launcher, and return its answer."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = answer, calls.result_decoder(function)
        self._tell(msgspec.structs.replace(calls.call(function, *arguments), number=number))
        return await answer

    def _tell(self, call: calls.Call) -> None:
        with contextlib.suppress(OSError):  # if the launcher has ended, the next read shows it
            self._control.send(calls.encode(call))

    def _read(self) -> None:
        try:
            data = self._control.recv(calls.MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            for _ in range(2):
                self._server.stop()  # the launcher has ended, and its workers end too
            return
        try:
            message = calls.message_decoder.decode(data)
            if isinstance(message, calls.Call):
                self._functions.run(message)
            elif message.number in self._asked:
                answer, decoder = self._asked.pop(message.number)
                if not answer.done():  # it may have been cancelled
                    answer.set_result(decoder.decode(message.value))
        except ProtocolError as error:
            log.error("dropped a message of the launcher: %s", error)


def main(fd: int) -> None:
    faulthandler.enable()
    control = socket.socket(fileno=fd)
    start = msgspec.msgpack.decode(control.recv(calls.MAX_MESSAGE_BYTES), type=calls.StartRouter)
    log_to_stderr(start.config.log_level, start.config.log_format, start.place.router_id)
    try:
        server = RouterServer(start.config, start.keys, start.link_host, start.place)
    except TandemError as error:
        control.send(calls.encode(calls.call(RouterEnd.cannot_start, str(error))))
        return
    freeze_heap()
    server.run(on_start=_Control(control, server).attach)


if __name__ == "__main__":
    main(int(sys.argv[1]))
