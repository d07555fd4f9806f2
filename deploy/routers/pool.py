"""Runs the routers' processes. The main thread keeps them running; the launcher's thread calls them.

The pool reserves their ports for as long as the launcher runs. A bound socket that does not listen reserves a
port: Linux lets a router bind the port too, and gives connections only to sockets that listen. So a restarted
router finds its ports free.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import msgspec

from deploy.routers import calls
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import ConfigError, ProtocolError
from protocol.ports import bind_one, http_url, router_ports
from protocol.requests import Adapter, AdapterName
from router.adapters import AdapterTable
from router.scaling import interface as scaling
from router.scaling.scaler import Autoscaler
from router.server import RouterPlace, RouterServer, bind_http
from router.workers.assignment import Demand, RoleDemand, sum_of

_TRIES = 20


class RouterPorts:
    """The ports of the routers: the shared `port`, and one more for each after it. Raises `ConfigError`."""

    def __init__(self, config: ServeConfig, link_host: str) -> None:
        self._kept = contextlib.ExitStack()
        self.port = self._keep_http(config)
        keep_link = partial(_keep_link, link_host)
        links = [bind_one(router_ports(config), keep_link) for _ in range(config.router_replicas)]
        for link in links:
            self._kept.callback(link.close)
        self.places = [
            RouterPlace(
                router_id=f"router-{index}", own_port=self.port + 1 + index, link_port=link.getsockname()[1]
            )
            for index, link in enumerate(links)
        ]

    def close(self) -> None:
        self._kept.close()

    def _keep_http(self, config: ServeConfig) -> int:
        """Return the configured shared port, or else a port followed by enough free ones."""
        for attempt in range(_TRIES):
            with contextlib.ExitStack() as kept:
                first = kept.enter_context(_keep(config.host, config.port))
                port: int = first.getsockname()[1]
                try:
                    for number in range(port + 1, port + 1 + config.router_replicas):
                        kept.enter_context(_keep(config.host, number))
                except ConfigError:
                    if config.port or attempt == _TRIES - 1:
                        raise
                    continue
                self._kept = kept.pop_all()
                return port
        raise AssertionError


def _keep_link(host: str, port: int) -> socket.socket:
    try:
        return _keep(host, port)
    except ConfigError as error:
        raise OSError(errno.EADDRINUSE, str(error)) from error


def _keep(host: str, port: int) -> socket.socket:
    """Reserve a port. A first, exclusive bind makes sure that no other process has it."""
    with bind_http(host, port) as probe:
        port = probe.getsockname()[1]
    return bind_http(host, port, shared=True, listens=False)


log = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.1
LEAST_LIFE_S = 1.0
"""The least time between two starts of a router."""


class RouterEnd:
    """The launcher's end of a router and its current process, and the functions that the router may call.

    `ready` becomes true with the process' first report.
    """

    def __init__(self, pool: RouterPool, place: RouterPlace) -> None:
        self._pool = pool
        self.place = place
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None
        self.started = self.last_message = 0.0
        self.ready = self.was_ready = False
        self.workers: Mapping[str, calls.KnownWorker] = {}
        self.demand: Demand = {}
        self.unsent_adapters: deque[calls.Call] = deque()
        """Changes of adapters that were not yet sent to the router."""
        self._functions = calls.Functions(
            *(self.report, self.let_go, self.renew, self.scale, self.begin, self.end),
            *(self.note, self.apply, self.cannot_start),
        )

    def send(self, message: msgspec.Struct) -> bool:
        """Send a message. Returns False if it does not fit, since the router is stuck."""
        if self.control is None:
            return False
        try:
            self.control.send(calls.encode(message), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def send_adapters(self) -> None:
        """Send the unsent changes of adapters, as many as fit now."""
        while self.unsent_adapters and self.send(self.unsent_adapters[0]):
            self.unsent_adapters.popleft()

    def take(self, data: bytes) -> None:
        """Run the call in a message, and answer it if it asks for an answer. Raises `ProtocolError`."""
        message = calls.message_decoder.decode(data)
        if isinstance(message, calls.Answer):
            raise ProtocolError("nobody asked for this answer")
        self.last_message = time.monotonic()
        value = self._functions.run(message)
        if message.number is not None:
            self.send(calls.Answer(message.number, msgspec.Raw(calls.encode(value))))

    # --- for the router ---------------------------------------------------------------------------

    def report(self, workers: dict[str, calls.KnownWorker], demand: dict[str, RoleDemand]) -> None:
        """Note the router's workers by id, and its requests' demand by role, a few times a second."""
        self.workers, self.demand = workers, demand
        self._pool.on_report(self)

    def let_go(self, worker_id: str, for_good: bool) -> str:
        """Return "" if a worker may be drained, for good or to change its role, else the reason why not."""
        return self._pool.let_go(worker_id, for_good)

    def renew(self, worker_id: str, role: str, incarnation: str) -> None:
        """Note that a drained worker continues in another role."""
        self._pool.renew(worker_id, role, incarnation)

    def scale(self, request: scaling.ScaleRequest) -> scaling.ScaleAnswer:
        """Change the number of workers."""
        return self._pool.scale(request)

    def begin(self, change: scaling.Change) -> str:
        """Begin a change that only one router may make at a time. Returns "", or why it cannot begin."""
        return self._pool.changes.begin(change, self.place.router_id)

    def end(self, change: scaling.Change) -> None:
        self._pool.changes.end(change, self.place.router_id)

    def note(self, event: scaling.ScalingEvent) -> None:
        """Note an event of autoscaling, and tell all routers."""
        self._pool.scalings.note(event)
        self._pool.broadcast(calls.call(scaling.ScalingLog.note, event))

    def apply(self, name: AdapterName, adapter: Adapter | None) -> None:
        """Note that `name` serves another adapter, or none, and tell the other routers."""
        self._pool.note_adapter(self, name, adapter)

    def cannot_start(self, reason: str) -> None:
        if not self.was_ready:
            raise ConfigError(reason)
        log.error("router %s cannot start: %s", self.place.router_id, reason)


class RouterPool:
    """Several routers, with `run` and the methods of `RouterServer` that the launcher calls.

    A router that dies is restarted, and one that is silent for twice --worker-timeout is killed. Only that
    router's requests are lost; workers free their blocks.
    """

    def __init__(self, config: ServeConfig, keys: ClusterKeys, link_host: str) -> None:
        self._ports = RouterPorts(config, link_host)
        self._config = replace(config, port=self._ports.port)
        self._keys = keys
        self._link_host = link_host
        self._routers = [RouterEnd(self, place) for place in self._ports.places]
        self.worker_endpoints = [f"tcp://{link_host}:{place.link_port}" for place in self._ports.places]
        self.url = http_url(config, config.host, self._ports.port)
        self._selector = selectors.DefaultSelector()
        self._expected = calls.call(RouterServer.expect, {}, {})
        self.let_go: Callable[[str, bool], str] = lambda worker_id, for_good: ""
        self.renew: Callable[[str, str, str], None] = lambda worker_id, role, incarnation: None
        self.scale: Callable[[scaling.ScaleRequest], scaling.ScaleAnswer] = lambda request: (
            scaling.ScaleAnswer(refusal="the server is starting", field=min(request.targets, default=""))
        )
        self._past: Demand = {}
        """The demand counted by routers that have ended; without it the sum over all routers would fall."""
        self.changes, self.scalings = scaling.ClusterChanges(), scaling.ScalingLog()
        self._adapters: dict[str, calls.Call] = {}
        """The latest change of each adapter that differs from the start, by name."""
        self._stops_asked = self._stops_sent = 0
        self._restore_signals = threading.Event()

    # --- for the launcher's thread ----------------------------------------------------------------

    def mark_dead(self, worker_id: str, incarnation: str, reason: str) -> None:
        self.broadcast(calls.call(RouterServer.mark_dead, worker_id, incarnation, reason))

    def expect(self, roles: Mapping[str, str], room: Mapping[str, int]) -> None:
        self._expected = calls.call(RouterServer.expect, dict(roles), dict(room))
        self.broadcast(self._expected)

    def on_leave(self, let_go: Callable[[str, bool], str], renew: Callable[[str, str, str], None]) -> None:
        self.let_go, self.renew = let_go, renew

    def on_scale(self, scale: Callable[[scaling.ScaleRequest], scaling.ScaleAnswer]) -> None:
        self.scale = scale

    def gave_up(self, worker_id: str, reason: str) -> None:
        self.broadcast(calls.call(RouterServer.gave_up, worker_id, reason))

    def replaced(self, process: str) -> None:
        self.broadcast(calls.call(RouterServer.replaced, process))

    def silence_of(self, worker_id: str, incarnation: str) -> float | None:
        """Return the seconds since any router heard from the worker, or None if no router knows it. Returns 0
        while no router listens, since that silence is not the worker's fault.
        """
        listening = [router for router in self._routers if router.ready]
        known = [router.workers[worker_id] for router in listening if worker_id in router.workers]
        silences = [worker.silence_s for worker in known if worker.incarnation == incarnation]
        if silences or not listening:
            return min(silences, default=0.0)
        return None

    def start_ups(self) -> dict[str, Mapping[str, str]]:
        return {name: known.start_up for router in self._routers for name, known in router.workers.items()}

    def stop(self) -> None:
        self._stops_asked += 1

    def restore_signals(self) -> None:
        self._restore_signals.set()

    # --- for the main thread ----------------------------------------------------------------------

    def run(
        self, on_start: Callable[[], None] = lambda: None, on_signal: Callable[[], None] | None = None
    ) -> None:
        """Keep the routers running until `stop`. Raises `ConfigError` if a first start fails."""
        handle = on_signal or self.stop
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda *_: handle()) for number in numbers}
        try:
            for router in self._routers:
                self._start(router)
            while not all(router.was_ready for router in self._routers) and not self._stops_asked:
                self._watch()
            if not self._stops_asked:
                on_start()
            while not self._stops_asked or any(router.process is not None for router in self._routers):
                self._watch()
        finally:
            for router in self._routers:
                if router.process is not None:
                    self._bury(router)
            self._selector.close()
            self._ports.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _watch(self) -> None:
        now = time.monotonic()  # before reading: if this process is held up meanwhile, no router is to blame
        for key, _ in self._selector.select(WATCH_INTERVAL_S):
            self._read(key.data)
        for router in self._routers:
            if router.process is not None:
                self._look_at(router, now)
            elif not self._stops_asked and now - router.started > LEAST_LIFE_S:
                self._start(router)
        if self._restore_signals.is_set():
            self._restore_signals.clear()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.getsignal(number))
        while self._stops_sent < self._stops_asked:
            self._stops_sent += 1
            self.broadcast(calls.call(RouterServer.stop))

    def _look_at(self, router: RouterEnd, now: float) -> None:
        if self._stops_asked and not router.ready:
            self._bury(router)  # a router reads no messages before it serves
            return
        limit = 2 * self._config.worker_timeout if router.ready else self._config.start_timeout
        if now - router.last_message > limit:
            self._on_end(router, f"it sent nothing for {limit:g} s")

    def _read(self, router: RouterEnd) -> None:
        if router.control is None:
            return
        try:
            data = router.control.recv(calls.MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._on_end(router, "its process ended")
            return
        try:
            router.take(data)
        except ProtocolError as error:
            self._on_end(router, f"it sent an unreadable message: {error}")

    def on_report(self, router: RouterEnd) -> None:
        """Tell a new router what it missed, and the one that scales the others' demand."""
        if not router.ready:
            router.ready = router.was_ready = True
            router.send(self._expected)
            for event in self.scalings.latest()[::-1]:
                router.send(calls.call(scaling.ScalingLog.note, event))
            router.unsent_adapters = deque(self._adapters.values())
        router.send_adapters()
        if self._leads(router):
            others = (each.demand for each in self._routers if each is not router)
            router.send(calls.call(Autoscaler.step, sum_of((self._past, *others))))

    def note_adapter(self, asked: RouterEnd, name: str, adapter: Adapter | None) -> None:
        change = calls.call(AdapterTable.apply, name, adapter)
        self._adapters.pop(name, None)
        if adapter is not None or name in (self._config.lora_modules or {}):
            self._adapters[name] = change
        for router in self._routers:
            if router is not asked and router.ready:
                router.unsent_adapters.append(change)
                router.send_adapters()

    def _leads(self, router: RouterEnd) -> bool:
        """Return whether this router now decides the number of workers for all routers."""
        may_scale = self._config.autoscale and "restart" not in self.changes.under_way
        return bool(may_scale) and router is next(each for each in self._routers if each.ready)

    def broadcast(self, message: calls.Call) -> None:
        for router in self._routers:
            router.send(message)

    def _start(self, router: RouterEnd) -> None:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            router.process = subprocess.Popen(
                [sys.executable, "-m", "deploy.routers.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        router.control = control
        router.started = router.last_message = time.monotonic()
        router.ready, router.workers = False, {}
        self._selector.register(control, selectors.EVENT_READ, router)
        router.send(calls.StartRouter(self._config, self._keys, self._link_host, router.place))

    def _on_end(self, router: RouterEnd, reason: str) -> None:
        self._bury(router)
        if not self._stops_asked:
            log.error("router %s ended: %s; it is restarted", router.place.router_id, reason)

    def _bury(self, router: RouterEnd) -> None:
        assert router.process is not None and router.control is not None
        router.process.kill()
        router.process.wait()
        self._selector.unregister(router.control)
        router.control.close()
        router.process, router.control, router.ready, router.workers = None, None, False, {}
        self.changes.forget(router.place.router_id)
        self._past, router.demand = sum_of((self._past, router.demand)), {}


Routers = RouterServer | RouterPool
"""The launcher's view of the routers. Any thread may call all methods except `run`."""
