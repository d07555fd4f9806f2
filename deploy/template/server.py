"""The template's process: accepts clients, forks workers for them, and reports how these end.

It has one thread, no CUDA context, no ZeroMQ context and no OpenMP threads, so a fork is safe. The models
that it has loaded are in ordinary memory, which its workers share because they never write to it. So a host
holds weights once, and in huge pages. (For files in memory, Linux uses huge pages only if an administrator
allows it.)
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import logging
import os
import select
import selectors
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec

from deploy.processes import adopt_orphans
from deploy.template import client as messages
from engine.light_imports import delay_kernels
from native.ownership import peer_of
from native.process import freeze_heap
from protocol.codec import BoundedDecoder
from protocol.config import ServeConfig
from protocol.errors import TandemError
from protocol.logs import log_to_stderr
from protocol.roles import ROLES
from worker.cores import CorePlace, CorePlaces
from worker.launch import Launch, StopHandle

if TYPE_CHECKING:
    from engine.parallel.leader import Leader

log = logging.getLogger(__name__)

_IDLE_S = 5.0
"""A template ends after this long without clients."""
_PR_SET_NAME = 15
_launch: BoundedDecoder[Launch] = BoundedDecoder(Launch)
_IMPORTED = (
    "worker.process",
    "kvtransfer.transports.ucx",
    "speculation.head_drafter",
    "speculation.medusa",
    "speculation.self_speculative",
    "speculation.weightless.lookahead",
    "speculation.weightless.ngram",
    "speculation.weightless.suffix",
)
"""The modules that a worker needs, including those that it would import late."""


def import_modules() -> None:
    """Import all that a worker needs. The garbage collector stays off until the heap is frozen: a collection
    scans all that has been imported so far.
    """
    gc.disable()
    delay_kernels()
    loops = (role.loop.partition(":")[0] for role in ROLES.values())
    for module in (*_IMPORTED, *loops):
        importlib.import_module(module)


@dataclass
class _Worker:
    worker_id: str
    client: socket.socket | None
    """The connection of the actor that watches the worker; None if the actor has ended."""
    control: socket.socket
    """The actor's end of the worker's control socket, kept for the next actor."""


class Template:
    """The template. It runs until it has had no clients and no workers for `_IDLE_S`."""

    def __init__(self, listener: socket.socket, launcher_pid: int) -> None:
        """Keep `launcher_pid`, the launcher's process id; 0 if the launcher runs on another host."""
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._wake, waker = socket.socketpair()
        self._waker = waker
        self._clients: set[socket.socket] = set()
        self._places = CorePlaces()
        self._workers: dict[int, _Worker] = {}
        """The workers that are not reaped yet, by process id."""
        self._launcher_fd: int | None = None
        """The launcher's pidfd. While the launcher runs, workers outlive their actors."""
        with contextlib.suppress(OSError):  # no launcher here, it has ended, or the kernel has no pidfds
            self._launcher_fd = os.pidfd_open(launcher_pid)

    def run(self) -> None:
        import_modules()
        adopt_orphans()  # the other ranks of killed workers
        freeze_heap()
        self._waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        if self._launcher_fd is not None:
            self._selector.register(self._launcher_fd, selectors.EVENT_READ)
        while ready := self._selector.select(None if self._clients or self._workers else _IDLE_S):
            for key, _ in ready:
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                    self._reap()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._clients:
                    self._serve(key.fileobj)
                elif key.fileobj == self._launcher_fd:
                    self._lose_launcher(self._launcher_fd)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if peer_of(client).user != os.getuid():
            client.close()
            return
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ)

    def _serve(self, client: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(client, messages.MAX_MESSAGE_BYTES, 1)
        except ConnectionError:
            data, fds = b"", []
        try:
            if data:
                answer = self._answer(client, data, fds)
                if isinstance(answer, messages.Spawned):
                    _send(client, answer, self._workers[answer.pid].control.fileno())
                elif answer is not None:
                    _send(client, answer)
            else:
                self._drop(client)
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(
        self, client: socket.socket, data: bytes, fds: list[int]
    ) -> messages.Spawned | messages.SpawnFailed | None:
        try:
            request = messages.template_request.decode(data)
            if isinstance(request, messages.Preload):
                self._preload(request.config)
                return None
            if isinstance(request, messages.Adopt):
                return messages.Spawned(self._adopt(client, request.worker_id))
            return messages.Spawned(self._spawn(client, request, fds))
        except Exception as error:
            if not isinstance(error, TandemError):
                log.exception("a worker cannot be started")
            return messages.SpawnFailed((str(error) or type(error).__name__)[: messages.MAX_REASON_CHARS])

    def _drop(self, client: socket.socket) -> None:
        """Remove an actor that has ended, and kill its worker unless another actor may adopt it."""
        for pid, worker in self._workers.items():
            if worker.client is client:
                worker.client = None
                if self._launcher_fd is None:
                    os.kill(pid, signal.SIGKILL)
        self._clients.remove(client)
        self._selector.unregister(client)
        client.close()

    def _lose_launcher(self, fd: int) -> None:
        """Kill the workers that no actor watches. Actors end by themselves."""
        self._launcher_fd = None
        self._selector.unregister(fd)
        os.close(fd)
        for pid, worker in self._workers.items():
            if worker.client is None:
                os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._places.give_back(pid)
                worker = self._workers.pop(pid, None)
                if worker is not None:
                    worker.control.close()
                    if worker.client is not None:
                        _send(worker.client, messages.Ended(pid, status))

    def _preload(self, config: ServeConfig) -> None:
        from kvtransfer.transports.ucx_agent import preload_nixl
        from worker.setup import preload_models, set_up_worker_logging, wires_of

        set_up_worker_logging(config, "template")
        if "ucx" in wires_of(config):
            preload_nixl()
        if preload_models(config):
            freeze_heap()

    def _spawn(self, client: socket.socket, request: messages.Spawn, fds: list[int]) -> int:
        launch = _launch.decode(request.launch)
        self._preload(launch.config)
        for pid, worker in self._workers.items():
            if worker.worker_id == launch.worker_id:
                os.kill(pid, signal.SIGKILL)  # no actor has adopted it
        place = self._places.first_free()
        ours, control = socket.socketpair()
        with control:
            pid = os.fork()
            if pid == 0:
                ours.close()
                self._become(launch, request.environment, control, fds, place)
        self._workers[pid] = _Worker(launch.worker_id, client, ours)
        self._places.take(pid, place)
        return pid

    def _adopt(self, client: socket.socket, worker_id: str) -> int:
        for pid, worker in self._workers.items():
            if worker.worker_id == worker_id:
                worker.client = client
                return pid
        raise messages.TemplateError("it ended while no actor watched it")

    def _become(
        self,
        launch: Launch,
        environment: dict[str, str],
        control: socket.socket,
        fds: list[int],
        place: CorePlace | None,
    ) -> NoReturn:
        """Run the worker in the forked process, and exit."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            controls = [worker.control for worker in self._workers.values()]
            for inherited in (self._listener, self._wake, self._waker, *self._clients, *controls):
                inherited.close()
            for fd in fds:
                os.dup2(fd, 2)
                os.close(fd)
            os.environ.update(environment)
            _set_name(launch.worker_id)
            _run_worker(launch, control, self._launcher_fd, place, _fork_ranks(launch, control))
        except BaseException:
            log.exception("the worker failed")
            os._exit(1)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _fork_ranks(launch: Launch, control: socket.socket) -> Leader | None:
    from worker.setup import fork_ranks

    def on_fork(name: str) -> None:
        control.close()
        _set_name(name)

    return fork_ranks(launch, on_fork)


def _run_worker(
    launch: Launch,
    control: socket.socket,
    launcher_fd: int | None,
    place: CorePlace | None,
    leader: Leader | None,
) -> None:
    """Run the worker until its actor says "stop", and send the reason if it ends earlier."""
    stop = StopHandle()

    def listen() -> None:
        control_fd = control.fileno()
        watched = [control_fd] if launcher_fd is None else [control_fd, launcher_fd]
        while select.select(watched, [], [])[0] == [control_fd] and control.recv(16):
            stop.stop()
        os._exit(1)  # the launcher has ended, or both the actor and the template have

    threading.Thread(target=listen, name="control", daemon=True).start()
    from worker.process import run_launch

    control.sendall((run_launch(launch, stop, place=place, leader=leader) + messages.REPORT_END).encode())


def _send(
    client: socket.socket, message: messages.Spawned | messages.SpawnFailed | messages.Ended, *fds: int
) -> None:
    """Send a message without waiting. It is dropped if it does not fit: the client reads nothing."""
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    with contextlib.suppress(OSError):  # if the client has ended, the next read shows it
        client.sendmsg([msgspec.msgpack.encode(message)], passed, socket.MSG_DONTWAIT)  # `send_fds` waits


def _set_name(name: str) -> None:
    """Set the name that `ps` and `top` show for this process."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"tandem:{name}".encode(), 0, 0, 0)


def main(name: str, launcher_pid: int) -> None:
    """Become the template of this name, in the background, unless one exists."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return
        raise
    wait_end, started = os.pipe()
    if os.fork():
        os.close(started)
        os._exit(0 if os.read(wait_end, 1) else 1)
    listener.listen()  # called after the fork, since clients see the process id of the caller
    os.write(started, b"x")
    os.close(wait_end)
    os.close(started)
    faulthandler.enable()
    log_to_stderr("warning", "text", name)
    Template(listener, launcher_pid).run()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
