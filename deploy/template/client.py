"""Starts workers: asks the host's template to fork them. The first client starts the template."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from deploy.template.messages import (
    MAX_MESSAGE_BYTES,
    REPORT_END,
    Ended,
    Spawn,
    Spawned,
    SpawnFailed,
    TemplateReply,
    peer_user,
    template_reply,
)
from protocol.errors import ProtocolError, TandemError

_STATUS_TIMEOUT_S = 10.0
"""A template that loads a model reports ended workers late."""

_INHERITED = ("CUDA_VISIBLE_DEVICES",)
"""Variables that a worker takes from its actor; it has all others from the template."""


class TemplateError(TandemError):
    """The template process could not be started, or ended."""


@dataclass(frozen=True)
class WorkerExit:
    """How a worker ended: `reason` is "" if it was asked to. `signal` is what killed it, if one did."""

    reason: str
    signal: int | None = None

    @property
    def was_killed(self) -> bool:
        """Whether somebody else ended it, as far as the signal tells."""
        return self.signal in (signal.SIGKILL, signal.SIGTERM)


class TemplateClient:
    """A connection to the template called `name`, made when it is first needed. For one thread at a time.

    The template ends, and with it this client's worker, when its clients are gone.
    """

    def __init__(self, name: str, environment: Mapping[str, str], *, own_stderr: bool) -> None:
        """`environment` is what a new template gets beside this process' own. With `own_stderr` workers
        write to this process' stderr, not to the template's.
        """
        self._name = name
        self._environment = environment
        self._own_stderr = own_stderr
        self._connection: socket.socket | None = None

    def connect(self) -> None:
        """Raises TemplateError."""
        for _ in range(3):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(f"\0{self._name}")
            except ConnectionRefusedError:
                connection.close()
                self._start()
            else:
                if peer_user(connection) != os.getuid():
                    connection.close()
                    raise TemplateError(f"another user's process has taken the template's name {self._name}")
                self._connection = connection
                return
        raise TemplateError("the template process ends as soon as it is started")

    def spawn(self, launch: bytes) -> WorkerProcess:
        """Raises TemplateError, also with what the template says against it."""
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        request = msgspec.msgpack.encode(Spawn(launch, environment))
        for _ in range(2):
            control, theirs = socket.socketpair()
            with theirs:
                answer = self._ask(request, [theirs.fileno(), *([2] if self._own_stderr else [])])
            if isinstance(answer, Spawned):
                return WorkerProcess(self, answer.pid, control)
            control.close()
            if isinstance(answer, SpawnFailed):
                raise TemplateError(answer.reason)
            self.close()  # that template is gone
        raise TemplateError("the template process ended")

    def status(self, pid: int) -> int | None:
        """Of a worker that has ended; None where the template is gone."""
        answer = self._receive(_STATUS_TIMEOUT_S)
        if isinstance(answer, Ended) and answer.pid == pid:
            return answer.status
        self.close()
        return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self, request: bytes, fds: list[int]) -> TemplateReply | None:
        if self._connection is None:
            self.connect()
        assert self._connection is not None
        try:
            socket.send_fds(self._connection, [request], fds)
        except OSError:
            return None
        return self._receive(None)

    def _receive(self, timeout_s: float | None) -> TemplateReply | None:
        if self._connection is None:
            return None
        self._connection.settimeout(timeout_s)
        try:
            return template_reply.decode(self._connection.recv(MAX_MESSAGE_BYTES))
        except (OSError, ProtocolError):
            return None

    def _start(self) -> None:
        """Returns once there is a template that takes connections, be it this one or another client's."""
        done = subprocess.run(
            [sys.executable, "-m", "deploy.template.server", self._name],
            env=os.environ | self._environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            process_group=0,  # spared Ctrl-C; Linux shares busy cores among sessions, so it stays in ours
            check=False,
        )
        if done.returncode != 0:
            raise TemplateError(f"the template process cannot start (exit status {done.returncode})")


class WorkerProcess:
    """A worker that runs. `stop` and `kill` may be called from any thread."""

    def __init__(self, client: TemplateClient, pid: int, control: socket.socket) -> None:
        self.pid = pid
        self._client = client
        self._control = control
        self._lock = threading.Lock()
        self._ended = False

    def stop(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(OSError):
            self._control.send(b"stop")

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if not self._ended:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> WorkerExit:
        """Wait until it has ended."""
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


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time ones have none
        return f"signal {number}"
