"""Runs a process in its own namespaces, which simulates hosts and containers on one machine."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.waiting import wait_until

START_S = 20.0


class Isolated:
    """A process tree with its own network, mounts, processes and host name. It ends with this process."""

    process: subprocess.Popen[bytes]
    init: psutil.Process

    def __init__(self, name: str, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path

    def launch(self, command: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None) -> None:
        """Start the command and return when it runs. Its network has only the loopback device."""
        isolate = ["setpriv", "--pdeathsig", "KILL", "unshare"]
        isolate += ["--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
        with self.log_path.open("wb") as output:
            self.process = subprocess.Popen(
                [*isolate, *command],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        wait_until(lambda: bool(psutil.Process(self.process.pid).children()), START_S, lambda: self.log)
        self.init = psutil.Process(self.process.pid).children()[0]
        self.network("link", "set", "lo", "up")

    def network(self, *command: str) -> None:
        """Run `ip` in this network. Works before the process has made its mounts, too."""
        inside = ("nsenter", "-n", "-t", str(self.init.pid), "--", "ip", *command)
        subprocess.run(inside, check=True, capture_output=True)

    def run(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command as root inside the namespaces."""
        namespaces = ["nsenter", "-a", "-t", str(self.init.pid), "--"]
        return subprocess.run(
            [*namespaces, *command], capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def kill(self) -> None:
        """Kill all processes inside at once, which also removes the network."""
        if hasattr(self, "process"):
            with contextlib.suppress(psutil.NoSuchProcess, AttributeError):
                self.init.kill()
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")
