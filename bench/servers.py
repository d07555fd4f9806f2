"""The processes of a serving system: start them, wait until they answer, and end them without leftovers."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import httpx
import psutil

from bench.report import REPO
from deploy.processes import end_with_parent
from native.ownership import check_own, open_own

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_SECONDS = 20.0
ORPHAN_SECONDS = 2.0

_PORTS = range(20_000, 32_000)
"""Ports below those that Linux gives to outgoing connections and to sockets bound to port 0."""

_held: dict[int, int] = {}


def free_port() -> int:
    """Return a port on which nothing listens. No other call in any process returns it while this process
    lives.

    Raises RuntimeError if there is none.
    """
    folder = Path(tempfile.gettempdir()) / f"tandem-bench-ports.{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    check_own(folder)
    for port in random.sample(_PORTS, len(_PORTS)):
        if port not in _held and _lock_port(folder / str(port), port):
            return port
    raise RuntimeError(f"no free port in {_PORTS.start} to {_PORTS.stop - 1}")


def _lock_port(path: Path, port: int) -> bool:
    """Lock the port's file; the kernel unlocks it when the process ends."""
    lock = open_own(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with socket.socket() as probe:
            probe.bind((HOST, port))
    except OSError:
        os.close(lock)
        return False
    _held[port] = lock
    return True


@dataclass(frozen=True, slots=True)
class Command:
    """One process: arguments, additions to the environment, and the URL that answers 200 when it is ready."""

    name: str
    argv: Sequence[str]
    ready_url: str
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        return self.ready_url.rpartition("/")[0]


class ServerProcess:
    """One running command; its output goes to a log file."""

    def __init__(self, command: Command, log_dir: Path) -> None:
        self.command = command
        self.log_path = log_dir / f"{command.name}.log"
        log_dir.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.env},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, deadline: float) -> None:
        """Wait until the server answers. `deadline` is on the monotonic clock.

        Raises RuntimeError, with the end of the log, if it ends first or is not ready in time.
        """
        while not _answers(self.command.ready_url):
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.command.name} isn't ready in time:\n{self._tail()}")
            time.sleep(0.25)

    def check(self) -> None:
        """Raise RuntimeError, with the end of the log, if the process has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.command.name} ended with {self._process.returncode}:\n{self._tail()}")

    def stop(self) -> None:
        """Ask the process to end; after a while kill it and its descendants."""
        family = self._family()
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        _, alive = psutil.wait_procs(family, timeout=ORPHAN_SECONDS)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=STOP_SECONDS)
        self._process.wait()

    def _family(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _tail(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-30:])


@contextmanager
def running(
    commands: Sequence[Command], log_dir: Path, timeout: float = START_TIMEOUT_S
) -> Iterator[list[ServerProcess]]:
    """Start all processes of one system, wait until they answer, and end them in reverse order.

    Meanwhile SIGTERM raises SystemExit in the main thread, so that the processes end then, too. Raises
    RuntimeError if one ends or is not ready in time.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _exit)
    deadline = time.monotonic() + timeout
    processes: list[ServerProcess] = []
    try:
        for command in commands:
            processes.append(ServerProcess(command, log_dir))
        for process in processes:
            process.wait_ready(deadline)
        yield processes
    finally:
        for process in reversed(processes):
            process.stop()


def tandem_command(*options: str) -> Command:
    """Return the command of `tandem serve` with these options, on a free port."""
    port = free_port()
    argv = [sys.executable, "-m", "deploy", "serve", "--host", HOST, "--port", str(port), *options]
    return Command("tandem", argv, f"http://{HOST}:{port}/ready", {"PYTHONPATH": str(REPO)})


@contextmanager
def serving(options: Sequence[str], log_dir: Path | None = None) -> Iterator[httpx.Client]:
    """Serve the bundled model and yield a client once every worker and router is ready. `log_dir` keeps the
    log, `tandem.log`. Raises RuntimeError if the server ends before that.
    """
    command = tandem_command(*options)
    with (
        tempfile.TemporaryDirectory() as temporary,
        running([command], log_dir or Path(temporary)) as [server],
    ):
        while "Listening on" not in server.log_path.read_text():
            server.check()
            time.sleep(0.2)
        with httpx.Client(base_url=command.base_url, timeout=300.0) as http:
            yield http


def _exit(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the shutdown of the servers
    sys.exit(128 + number)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
