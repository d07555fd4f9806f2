"""The template's process: accepts clients, forks workers for them, and reports how these end.

It has one thread, no CUDA context, no ZeroMQ context and no OpenMP threads, so a fork is safe. The models
that it has loaded are in ordinary memory, which its workers share because they never write to it. So a host
holds weights once, and in huge pages. (For files in memory, Linux uses huge pages only if an administrator
allows it.)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import gc
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

import msgspec

from deploy.launch import run_launch
from deploy.processes import adopt_orphans
from deploy.template.client import (
    MAX_MESSAGE_BYTES,
    MAX_REASON_CHARS,
    REPORT_END,
    Ended,
    Preload,
    Spawn,
    Spawned,
    SpawnFailed,
    peer_of,
    template_request,
)
from protocol.codec import BoundedDecoder
from protocol.config import ServeConfig
from protocol.errors import ProtocolError, TandemError
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
    "speculation.medusa.drafter",
    "speculation.self_speculative.drafter",
    "speculation.weightless.lookahead",
    "speculation.weightless.ngram",
    "speculation.weightless.suffix",
)
"""The modules that a worker needs, including those that it would import late."""


class Template:
    """Runs until it has had no clients for `_IDLE_S`."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._wake, waker = socket.socketpair()
        self._waker = waker
        self._clients: set[socket.socket] = set()
        self._places = CorePlaces()
        self._workers: dict[int, socket.socket] = {}
        """The client of each process that is not reaped yet."""

    def run(self) -> None:
        loops = (role.loop.partition(":")[0] for role in ROLES.values())
        for module in (*_IMPORTED, *loops):
            importlib.import_module(module)
        from kvtransfer.transports.ucx_agent import preload_nixl

        preload_nixl()
        adopt_orphans()  # these are the ranks of killed workers
        _settle()
        self._waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while ready := self._selector.select(None if self._clients else _IDLE_S):
            for key, _ in ready:
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                    self._reap()
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._clients:
                    self._serve(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if peer_of(client).user != os.getuid():
            client.close()
            return
        self._clients.add(client)
        self._selector.register(client, selectors.EVENT_READ)

    def _serve(self, client: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(client, MAX_MESSAGE_BYTES, 2)
        except ConnectionError:
            data, fds = b"", []
        try:
            if data:
                answer = self._answer(client, data, fds)
                if answer is not None:
                    _send(client, answer)
            else:
                self._drop(client)
        finally:
            for fd in fds:
                os.close(fd)

    def _answer(self, client: socket.socket, data: bytes, fds: list[int]) -> Spawned | SpawnFailed | None:
        try:
            request = template_request.decode(data)
            if isinstance(request, Preload):
                self._preload(request.config)
                return None
            return Spawned(self._spawn(client, request, fds))
        except Exception as error:
            if not isinstance(error, TandemError):
                log.exception("a worker cannot be started")
            return SpawnFailed((str(error) or type(error).__name__)[:MAX_REASON_CHARS])

    def _drop(self, client: socket.socket) -> None:
        """Remove a client that has ended, and kill its worker, whose actor has ended too."""
        for pid, owner in self._workers.items():
            if owner is client:
                os.kill(pid, signal.SIGKILL)
        self._clients.remove(client)
        self._selector.unregister(client)
        client.close()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                client = self._workers.pop(pid, None)
                self._places.give_back(pid)
                if client in self._clients:
                    _send(client, Ended(pid, status))

    def _preload(self, config: ServeConfig) -> None:
        from worker.setup import preload_models, set_up_worker_logging

        set_up_worker_logging(config, "template")
        if preload_models(config):
            _settle()

    def _spawn(self, client: socket.socket, request: Spawn, fds: list[int]) -> int:
        launch = _launch.decode(request.launch)
        if not fds:
            raise ProtocolError("a worker's control socket is missing")
        self._preload(launch.config)
        place = self._places.first_free()
        pid = os.fork()
        if pid == 0:
            self._become(launch, request.environment, fds, place)
        self._workers[pid] = client
        self._places.take(pid, place)
        return pid

    def _become(
        self, launch: Launch, environment: dict[str, str], fds: list[int], place: CorePlace | None
    ) -> NoReturn:
        """Run the worker in the forked process, and exit."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._selector.close()
            for inherited in (self._listener, self._wake, self._waker, *self._clients):
                inherited.close()
            control = socket.socket(fileno=os.dup(fds[0]))
            if len(fds) > 1:
                os.dup2(fds[1], 2)
            for fd in fds:
                os.close(fd)
            os.environ.update(environment)
            _set_name(launch.worker_id)
            _run_worker(launch, control, place, _fork_ranks(launch, control))
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
    launch: Launch, control: socket.socket, place: CorePlace | None, leader: Leader | None
) -> None:
    """Run the worker until its actor says "stop", and send the reason if it ends earlier."""
    stop = StopHandle()

    def listen() -> None:
        while control.recv(16):
            stop.stop()
        os._exit(1)  # the actor has ended

    threading.Thread(target=listen, name="control", daemon=True).start()
    control.sendall((run_launch(launch, stop, place=place, leader=leader) + REPORT_END).encode())


def _settle() -> None:
    """Exclude all current objects from garbage collection, which would copy their pages in every worker."""
    gc.collect()
    gc.freeze()
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _send(client: socket.socket, message: Spawned | SpawnFailed | Ended) -> None:
    """Send a message without waiting. If it does not fit, the client reads nothing: it is dropped."""
    with contextlib.suppress(OSError):  # if the client has ended, the next read shows it
        client.sendmsg([msgspec.msgpack.encode(message)], [], socket.MSG_DONTWAIT)


def _set_name(name: str) -> None:
    """Set the name that `ps` and `top` show for this process."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"tandem:{name}".encode(), 0, 0, 0)


def main(name: str) -> None:
    """Become the template of this name, in the background, unless there is one."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return
        raise
    listens, told = os.pipe()
    if os.fork():
        os.close(told)
        os._exit(0 if os.read(listens, 1) else 1)
    listener.listen()  # called by the process that continues, since clients get the caller's process id
    os.write(told, b"x")
    os.close(listens)
    os.close(told)
    faulthandler.enable()
    log_to_stderr("warning", "text", name)
    Template(listener).run()


if __name__ == "__main__":
    main(sys.argv[1])
