"""Starts workers: asks the host's template to fork them, over a local socket that keeps message boundaries.

The first client starts the template, and a client that finds it stuck replaces it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import psutil
from msgspec import Meta

from deploy.processes import ProcessWatch, import_paths
from native.ownership import peer_of
from protocol.codec import BoundedDecoder
from protocol.config import ServeConfig
from protocol.errors import ProtocolError, TandemError
from protocol.ids import Id

MAX_MESSAGE_BYTES = 128 * 1024
MAX_REASON_CHARS = 4096

_Pid = Annotated[int, Meta(ge=1, le=2**22)]
_Status = Annotated[int, Meta(ge=0, le=2**16 - 1)]

REPORT_END = "\n"
"""The end of a worker's report on its control socket. The report is the reason for its end, or ""."""


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """A request to fork a worker. The message carries the worker's stderr if it has its own."""

    launch: bytes
    environment: dict[str, str]


class Adopt(msgspec.Struct, frozen=True, tag="adopt"):
    """A request to become the client of a running worker whose own client has ended."""

    worker_id: Id


class Preload(msgspec.Struct, frozen=True, tag="preload"):
    """A request to load this configuration's model for workers that start later. It has no answer."""

    config: ServeConfig


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    """The answer that the worker runs. It carries the client's end of the worker's control socket."""

    pid: _Pid


class SpawnFailed(msgspec.Struct, frozen=True, tag="failed"):
    reason: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The news that a worker's process ended, with the `status` of `os.waitpid`."""

    pid: _Pid
    status: _Status


TemplateReply = Spawned | SpawnFailed | Ended

template_request: BoundedDecoder[Spawn | Adopt | Preload] = BoundedDecoder(Spawn | Adopt | Preload)
template_reply: BoundedDecoder[TemplateReply] = BoundedDecoder(TemplateReply)


_STATUS_TIMEOUT_S = 10.0
"""The longest wait for a worker's exit status: a template that loads a model reports it late."""

_START_TIMEOUT_S = 60.0
"""The longest wait for a template's start. Its first imports take a second, or many on a busy host."""

_LOOK_S = 0.5
"""The interval at which a waiting client checks the template's process."""

_KILL_S = 2.0
"""The time in which a killed template must end; otherwise the next template gets another name."""

_ARGUMENTS = ("-m", "deploy.template.server")
_INHERITED = ("CUDA_VISIBLE_DEVICES",)
"""Variables that a worker takes from its actor. All others come from the template."""


class TemplateError(TandemError):
    """The template process could not be started, or ended."""


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended: the reason, or "" on request, and the signal that killed it, if any."""

    reason: str
    signal: int | None = None

    @property
    def was_killed(self) -> bool:
        """Whether the process was killed from outside, judging by the signal."""
        return self.signal in (signal.SIGKILL, signal.SIGTERM)


class TemplateClient:
    """A client of the template called `name`, which connects when first needed. Only one thread at a time may
    use it, except for `waits_for` and `replaced`.

    The template ends when its clients are gone. A worker ends with its client, except on the launcher's host:
    while the launcher runs, another client may adopt the worker. A client kills a template that is stopped or
    stuck, and starts another; the workers of the old one continue. If a template cannot be killed, the next
    one is called `name.1`, and so on, so all clients of a host find the same template.
    """

    def __init__(
        self, name: str, environment: Mapping[str, str], *, own_stderr: bool, launcher_pid: int = 0
    ) -> None:
        """Add `environment` to this process' own for a new template. With `own_stderr`, workers write to this
        process' stderr instead of the template's. `launcher_pid` is 0 if it runs on another host.
        """
        self._first_name, self._num_left = name, 0
        self._environment = environment
        self._own_stderr = own_stderr
        self._launcher_pid = launcher_pid
        self._starting: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._watch: ProcessWatch | None = None
        self.waits_for = ""
        """The process whose answer is awaited, and for how long, in words."""
        self.replaced: list[str] = []
        """The reasons why templates were replaced."""

    @property
    def _name(self) -> str:
        return self._first_name + (f".{self._num_left}" if self._num_left else "")

    def connect(self) -> None:
        """Connect to the template; start it if there is none. Raises `TemplateError`."""
        if self._starting is not None:
            self._start()
        for _ in range(3):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.setblocking(False)
            try:
                connection.connect(f"\0{self._name}")
            except ConnectionRefusedError:
                connection.close()
                self._start()
            except BlockingIOError as error:
                connection.close()
                raise TemplateError("too many clients wait for the template process") from error
            else:
                peer = peer_of(connection)
                if peer.user != os.getuid():
                    connection.close()
                    raise TemplateError(f"another user's process has taken the template's name {self._name}")
                self._connection = connection
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended: the next answer shows that
                    self._watch = ProcessWatch(peer.pid)
                return
        raise TemplateError("the template process ends as soon as it is started")

    def begin(self) -> None:
        """Start a template. `connect` then waits until it accepts clients."""
        self._starting = subprocess.Popen(
            [sys.executable, *_ARGUMENTS, self._name, str(self._launcher_pid)],
            env=os.environ | self._environment | import_paths(),
            stdin=subprocess.DEVNULL,
            process_group=0,  # no Ctrl-C, but our session: Linux divides busy cores among sessions
        )

    def preload(self, config: ServeConfig) -> None:
        """Have the template load a model as soon as it can, so that `spawn` need not wait for it."""
        self.connect()
        assert self._connection is not None
        with contextlib.suppress(OSError):  # the next request shows if the template has ended
            self._connection.send(msgspec.msgpack.encode(Preload(config)))

    def spawn(self, launch: bytes, patience_s: float) -> WorkerProcess:
        """Have a worker forked; its model may load for up to `patience_s` before. Raises `TemplateError`."""
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        return self._obtain(Spawn(launch, environment), patience_s)

    def adopt(self, worker_id: str, patience_s: float) -> WorkerProcess:
        """Take over a worker that has outlived its client. Raises `TemplateError` if it has ended."""
        return self._obtain(Adopt(worker_id), patience_s)

    def _obtain(self, request: Spawn | Adopt, patience_s: float) -> WorkerProcess:
        encoded = msgspec.msgpack.encode(request)
        for _ in range(3):
            answer, controls = self._ask(encoded, patience_s)
            if isinstance(answer, Spawned) and controls:
                return WorkerProcess(self, answer.pid, socket.socket(fileno=controls[0]))
            _close(controls)
            if isinstance(answer, SpawnFailed):
                raise TemplateError(answer.reason)
            self.close()  # that template has ended
        raise TemplateError("the template process ended, " + (self.replaced or ["again and again"])[-1])

    def status(self, pid: int) -> int | None:
        """Return the wait status of an ended worker, or None if the template has ended."""
        answer, controls = self._receive(_STATUS_TIMEOUT_S)
        _close(controls)
        if isinstance(answer, Ended) and answer.pid == pid:
            return answer.status
        self.close()
        return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._watch = None

    def _ask(self, request: bytes, patience_s: float) -> tuple[TemplateReply | None, list[int]]:
        if self._connection is None:
            self.connect()
        assert self._connection is not None
        try:
            socket.send_fds(self._connection, [request], [2] if self._own_stderr else [])
        except OSError:
            return None, []
        began = time.monotonic()
        answer, controls = self._receive(patience_s)
        if answer is None and self._watch is not None and time.monotonic() - began > patience_s:
            self._replace(self._watch, f"process {self._watch.pid} has not answered for {patience_s:.0f} s")
        return answer, controls

    def _receive(self, timeout_s: float) -> tuple[TemplateReply | None, list[int]]:
        """Return the next reply and its file descriptors; None if the template ended, was stuck or takes too
        long.
        """
        controls: list[int] = []
        if self._connection is None:
            return None, controls
        began = time.monotonic()
        self._connection.settimeout(_LOOK_S)
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    data, controls, _, _ = socket.recv_fds(self._connection, MAX_MESSAGE_BYTES, 1)
                    return template_reply.decode(data), controls
                waited_s = time.monotonic() - began
                if self._is_stuck(waited_s) or waited_s > timeout_s:
                    return None, controls
        except (OSError, ProtocolError):
            return None, controls
        finally:
            self.waits_for = ""

    def _is_stuck(self, waited_s: float) -> bool:
        """Check the template's process, and replace it if it makes no progress."""
        watch = self._watch
        if watch is None:
            return False
        watch.look()
        self.waits_for = f"its host's template (process {watch.pid}, {watch.state}) for {waited_s:.0f} s"
        if watch.stuck:
            self._replace(watch, watch.stuck)
        return bool(watch.stuck)

    def _replace(self, template: ProcessWatch, reason: str) -> None:
        """Kill the template. The next request starts another."""
        self.replaced.append(reason)
        if not template.end(_KILL_S):
            self._num_left += 1
        self.close()

    def _start(self) -> None:
        """Wait until a template, started by this client or another one, accepts connections."""
        self.waits_for = "its host's template to start"
        if self._starting is None:
            self.begin()
        assert self._starting is not None
        try:
            status = self._starting.wait(_START_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            self._starting.kill()
            limit = f"{_START_TIMEOUT_S:.0f} s"
            raise TemplateError(f"the template process did not start within {limit}") from error
        finally:
            self.waits_for, self._starting = "", None
        if status != 0:
            raise TemplateError(f"the template process cannot start (exit status {status})")


class WorkerProcess:
    """A running worker. Any thread may call `stop` and `kill`."""

    def __init__(self, client: TemplateClient, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self._client = client
        self._control = control
        self._lock = threading.Lock()
        self._ended = False

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._control.send(b"stop")

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._ended:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> WorkerExit:
        report = bytearray()
        with contextlib.suppress(OSError):
            while data := self._control.recv(4096):
                report += data
        with self._lock:
            self._ended = True
        status = self._client.status(self.pid)
        self._control.close()
        if report:
            return WorkerExit(report.decode(errors="replace").removesuffix(REPORT_END))
        if status is None:
            return WorkerExit("its process ended")
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return WorkerExit(f"its process was ended by {_name(number)}", number)
        return WorkerExit(f"its process ended with status {os.WEXITSTATUS(status)}")


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
