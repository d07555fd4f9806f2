"""Starts the processes of a serving system, waits until they answer, and ends them without leftovers."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

import psutil

STOP_SECONDS = 20.0
ORPHAN_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Command:
    """One process: arguments, additions to the environment, and the URL that answers 200 when it is ready."""

    name: str
    argv: Sequence[str]
    ready_url: str
    env: Mapping[str, str] = field(default_factory=dict)


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

    def _tail(self, lines: int = 30) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


class RunningSystem:
    """All processes of one system, started together; a context manager that ends them in reverse order.

    While it is entered, SIGTERM raises SystemExit in the main thread, so that the processes end then, too.
    """

    def __init__(self, commands: Sequence[Command], log_dir: Path, timeout: float) -> None:
        self._commands = commands
        self._log_dir = log_dir
        self._timeout = timeout
        self._processes: list[ServerProcess] = []

    def __enter__(self) -> "RunningSystem":
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _exit)
        deadline = time.monotonic() + self._timeout
        try:
            for command in self._commands:
                self._processes.append(ServerProcess(command, self._log_dir))
            for process in self._processes:
                process.wait_ready(deadline)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def pids(self) -> list[int]:
        """Return the process id of each command."""
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Raise RuntimeError if a process has ended."""
        for process in self._processes:
            process.check()

    def _stop(self) -> None:
        while self._processes:
            self._processes.pop().stop()


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
