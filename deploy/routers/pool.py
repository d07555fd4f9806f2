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
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from deploy.routers import messages
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import ConfigError, ProtocolError
from protocol.ports import bind_one, http_url, router_ports
from router.scaling.interface import ClusterChanges, ScaleAnswer, ScaleRequest, ScalingLog
from router.server import RouterPlace, RouterServer, bind_http
from router.workers.assignment import Demand, sum_of

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


@dataclass(eq=False)
class _Router:
    """A router and its current process. `ready` becomes true with the process' first report."""

    place: RouterPlace
    process: subprocess.Popen[bytes] | None = None
    control: socket.socket | None = None
    started: float = 0.0
    last_message: float = 0.0
    ready: bool = False
    was_ready: bool = False
    workers: Mapping[str, messages.KnownWorker] = field(default_factory=dict)
    demand: Demand = field(default_factory=dict)

    unsent_adapters: deque[messages.AdapterChange] = field(default_factory=deque)
    """Changes of adapters that were not yet sent to the router."""

    def send(self, message: messages.ToRouter) -> bool:
        """Send a message. Returns False if it does not fit, since the router is stuck."""
        if self.control is None:
            return False
        try:
            self.control.send(msgspec.msgpack.encode(message), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def send_adapters(self) -> None:
        """Send the unsent changes of adapters, as many as fit now."""
        while self.unsent_adapters and self.send(self.unsent_adapters[0]):
            self.unsent_adapters.popleft()


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
        self._routers = [_Router(place) for place in self._ports.places]
        self.worker_endpoints = [f"tcp://{link_host}:{place.link_port}" for place in self._ports.places]
        self.url = http_url(config, config.host, self._ports.port)
        self._selector = selectors.DefaultSelector()
        self._expected = messages.Expect({}, {})
        self._let_go: Callable[[str, bool], str] = lambda worker_id, for_good: ""
        self._renew: Callable[[str, str, str], None] = lambda worker_id, role, incarnation: None
        self._scale: Callable[[ScaleRequest], ScaleAnswer] = lambda request: ScaleAnswer(
            refusal="the server is starting", field=min(request.targets, default="")
        )
        self._past: Demand = {}
        """The demand counted by routers that have ended; without it the sum over all routers would fall."""
        self._changes, self._scalings = ClusterChanges(), ScalingLog()
        self._adapters: dict[str, messages.AdapterChange] = {}
        """The latest change of each adapter that differs from the start, by name."""
        self._stops_asked = self._stops_sent = 0
        self._restore_signals = threading.Event()

    # --- for the launcher's thread ----------------------------------------------------------------

    def mark_dead(self, worker_id: str, incarnation: str, reason: str) -> None:
        self._broadcast(messages.WorkerDied(worker_id, incarnation, reason))

    def expect(self, roles: Mapping[str, str], room: Mapping[str, int]) -> None:
        self._expected = messages.Expect(dict(roles), dict(room))
        self._broadcast(self._expected)

    def on_leave(self, let_go: Callable[[str, bool], str], renew: Callable[[str, str, str], None]) -> None:
        self._let_go, self._renew = let_go, renew

    def on_scale(self, scale: Callable[[ScaleRequest], ScaleAnswer]) -> None:
        self._scale = scale

    def gave_up(self, worker_id: str, reason: str) -> None:
        self._broadcast(messages.GaveUp(worker_id, reason))

    def replaced(self, process: str) -> None:
        self._broadcast(messages.Replaced(process))

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
        before = {
            number: signal.signal(number, lambda *_: handle()) for number in (signal.SIGINT, signal.SIGTERM)
        }
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
        for key, _ in self._selector.select(WATCH_INTERVAL_S):
            self._read(key.data)
        now = time.monotonic()
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
            self._broadcast(messages.StopRouter())

    def _look_at(self, router: _Router, now: float) -> None:
        if self._stops_asked and not router.ready:
            self._bury(router)  # a router reads no messages before it serves
            return
        limit = 2 * self._config.worker_timeout if router.ready else self._config.start_timeout
        if now - router.last_message > limit:
            self._on_end(router, f"it sent nothing for {limit:g} s")

    def _read(self, router: _Router) -> None:
        if router.control is None:
            return
        try:
            data = router.control.recv(messages.MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            self._on_end(router, "its process ended")
            return
        try:
            message = messages.from_router.decode(data)
        except ProtocolError as error:
            self._on_end(router, f"it sent an unreadable message: {error}")
            return
        router.last_message = time.monotonic()
        match message:
            case messages.RouterReport(workers, demand):
                router.workers, router.demand = workers, demand
                if not router.ready:
                    router.ready = router.was_ready = True
                    router.send(self._expected)
                    for event in self._scalings.latest()[::-1]:
                        router.send(messages.AutoscalerEvent(event))
                    router.unsent_adapters = deque(self._adapters.values())
                router.send_adapters()
                if self._leads(router):
                    others = (each.demand for each in self._routers if each is not router)
                    router.send(messages.OtherDemand(sum_of((self._past, *others))))
            case messages.LeaveRequest(worker_id, for_good):
                router.send(messages.LeaveAnswer(worker_id, self._let_go(worker_id, for_good)))
            case messages.RoleChange(worker_id, role, incarnation):
                self._renew(worker_id, role, incarnation)
            case messages.Scales(request):
                router.send(messages.Scaled(self._scale(request)))
            case messages.ChangeRequest(change):
                router.send(messages.ChangeAnswer(self._changes.begin(change, router.place.router_id)))
            case messages.ChangeEnd(change):
                self._changes.end(change, router.place.router_id)
            case messages.AutoscalerEvent(event):
                self._scalings.note(event)
                self._broadcast(messages.AutoscalerEvent(event))
            case messages.AdapterChange():
                self._note_adapter(message, router)
            case messages.CannotStart(reason):
                if not router.was_ready:
                    raise ConfigError(reason)
                log.error("router %s cannot start: %s", router.place.router_id, reason)

    def _note_adapter(self, change: messages.AdapterChange, asked: _Router) -> None:
        self._adapters.pop(change.name, None)
        if change.adapter is not None or change.name in (self._config.lora_modules or {}):
            self._adapters[change.name] = change
        for router in self._routers:
            if router is not asked and router.ready:
                router.unsent_adapters.append(change)
                router.send_adapters()

    def _leads(self, router: _Router) -> bool:
        """Return whether this router now decides the number of workers for all routers."""
        may_scale = self._config.autoscale and "restart" not in self._changes.under_way
        return bool(may_scale) and router is next(each for each in self._routers if each.ready)

    def _broadcast(self, message: messages.ToRouter) -> None:
        for router in self._routers:
            router.send(message)

    # --- one router -------------------------------------------------------------------------------

    def _start(self, router: _Router) -> None:
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
        router.send(messages.StartRouter(self._config, self._keys, self._link_host, router.place))

    def _on_end(self, router: _Router, reason: str) -> None:
        self._bury(router)
        if not self._stops_asked:
            log.error("router %s ended: %s; it is restarted", router.place.router_id, reason)

    def _bury(self, router: _Router) -> None:
        assert router.process is not None and router.control is not None
        router.process.kill()
        router.process.wait()
        self._selector.unregister(router.control)
        router.control.close()
        router.process, router.control, router.ready, router.workers = None, None, False, {}
        self._changes.forget(router.place.router_id)
        self._past, router.demand = sum_of((self._past, router.demand)), {}


Routers = RouterServer | RouterPool
"""The launcher's view of the routers. Any thread may call all methods except `run`."""
