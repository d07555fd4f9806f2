"""Runs `tandem serve` in a separate process, and finds what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from bench.shapes.tokenizer import save_tokenizer
from tests.processes import is_running
from tests.waiting import wait_until
from tests.worker.tiny_model import VOCAB_SIZE, write_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
START_S = 150.0
END_S = 60.0
GONE_S = 20.0
ANSWER_S = 60.0
"""The longest wait for an answer. Clients' own limits may be too short on a busy machine."""


def write_served(folder: Path) -> Path:
    """Write a random model with a tokenizer, which `tandem serve` serves under the name `tiny`."""
    model = folder / "tiny"
    model.mkdir()
    write_tiny_llama(model)
    save_tokenizer(model, VOCAB_SIZE, 1024)
    return model


MODULES = ("json", "ray", "router", "worker", "engine", "messaging", "msgspec", "numpy", "torch", "uvicorn")


def write_strange_modules(folder: Path) -> Path:
    """Write modules that a server needs, each of which says when it is imported."""
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text("import os\nos.makedirs(__file__ + '.imported', exist_ok=True)\n")
    return folder


def tandem_command(*arguments: str, prelude: str = "") -> list[str]:
    if prelude:
        start = "\nfrom deploy.__main__ import main\nmain()"
        return [sys.executable, "-c", prelude + start, *arguments]
    return [sys.executable, "-m", "deploy", *arguments]


class ServerProcess:
    """A server that starts at once. `wait_ready` waits until it serves."""

    def __init__(self, model: Path, log: Path, *options: str, prelude: str = "", folder: Path = ROOT) -> None:
        """Start the server in a working folder. `prelude` is Python code that runs first in its process."""
        defaults = ["--port", "0", "--dtype", "float32", "--compile", "off"]
        defaults += ["--kv-cache-memory-bytes", "8000000", "--worker-timeout", "15"]
        self._log = log
        self._options = options
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
        command = tandem_command("serve", str(model), *defaults, *options, prelude=prelude)
        if folder != ROOT:  # as the installed command does, Python itself looks for no module there
            command.insert(1, "-P")
            environment["PYTHONPATH"] = str(ROOT)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self.seen: dict[int, psutil.Process] = {}

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def url(self) -> str:
        found = re.search(r"(?:^|\\n)Listening on (http://\S+)", self.log, re.MULTILINE)
        assert found is not None, self.log
        return found.group(1)

    def wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        wait_until(done, timeout_s, lambda: self.log, meanwhile=self._look_later)

    def _look_later(self) -> None:
        time.sleep(0.15)  # each look reads all of /proc
        self.look()

    def look(self) -> None:
        """Record every descendant that exists now."""
        if self.process.poll() is not None:
            return  # the pid may have been reused
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[child.pid] = child
        except psutil.NoSuchProcess:
            return

    def wait_ready(self) -> ServerProcess:
        self.wait(lambda: "Listening on" in self.log or self.process.poll() is not None, START_S)
        assert self.process.poll() is None, self.log
        self.look()
        return self

    def wait_end(self, timeout_s: float = END_S) -> int:
        self.wait(lambda: self.process.poll() is not None, timeout_s)
        assert self.process.returncode is not None
        return self.process.returncode

    def lose(self, name: str) -> None:
        """Kill the first of the server's processes with this name, and wait until another one runs."""
        old = next(each for each in self.alive() if name in each.name())
        old.kill()
        self.wait(lambda: any(name in each.name() and each != old for each in self.alive()), END_S)

    def end_without_launcher(self) -> None:
        """Kill the launcher. Workers and all of Ray have to end too."""
        ours = self.alive()
        assert sum("WorkerActor" in process.name() for process in ours) == 2
        self.process.kill()
        self.process.wait()
        gone, left = psutil.wait_procs(ours, timeout=30)
        assert [process.name() for process in left] == []
        assert len(gone) > 4

    def alive(self) -> list[psutil.Process]:
        """Return the living descendants."""
        self.look()
        return [process for process in self.seen.values() if is_running(process)]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group, as a terminal does."""
        self.look()
        os.killpg(self.process.pid, number)

    def workers(self) -> dict[str, dict[str, Any]]:
        answer = httpx.get(f"{self.url}/workers", timeout=ANSWER_S).json()
        return {worker["id"]: worker for worker in answer["workers"]}

    def worker_pid(self, worker_id: str) -> int:
        return int(self.workers()[worker_id]["pid"])

    def complete(self, prompt: str | list[int], **parameters: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True} | parameters
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=ANSWER_S)

    def has_begun(self, name: str) -> bool:
        """Tell whether a descendant with this in its name was seen."""
        return any(is_running(each) and name in each.name() for each in self.seen.values())

    def leftovers(self) -> list[str]:
        """Return processes and directories that stay. A killed process may take a moment."""
        deadline = time.monotonic() + GONE_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _left(self) -> list[str]:
        left = [f"process {p.pid} {_name(p)}" for p in self.seen.values() if is_running(p)]
        left += [str(path) for path in set(Path("/tmp").glob(f"tandem-{self.process.pid}-*"))]
        return left

    def kill(self) -> None:
        """Kill everything after a test, whatever its outcome."""
        self.look()
        for process in [*self.seen.values()]:
            if is_running(process):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:100]
    except psutil.Error:
        return "?"


Found = TypeVar("Found")


def of_each(
    processes: list[psutil.Process], look: Callable[[psutil.Process], Iterable[Found]]
) -> Iterator[tuple[psutil.Process, Found]]:
    """Yield what `look` finds at each process. Some of Ray's end at any time, and have nothing then."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for found in list(look(process)):
                yield process, found


def listening_ports(processes: list[psutil.Process]) -> set[int]:
    """Return the TCP ports that these processes listen on."""
    found = of_each(processes, lambda process: process.net_connections("tcp"))
    return {each.laddr.port for _, each in found if each.status == psutil.CONN_LISTEN}


def shared_files(processes: list[psutil.Process]) -> set[str]:
    """Return the paths in /dev/shm that these processes have mapped."""
    paths = {mapped.path for _, mapped in of_each(processes, psutil.Process.memory_maps)}
    return {path for path in paths if path.startswith("/dev/shm/")}


def read_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the server-sent events up to the end or an error."""
    events = []
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            events.append(json.loads(line.removeprefix("data: ")))
    return events


def wide_listeners(processes: list[psutil.Process]) -> set[str]:
    """Return names and addresses of these processes that listen beyond loopback."""
    return {
        f"{_name(process)}: {connection.laddr}"
        for process, connection in of_each(processes, lambda process: process.net_connections("inet"))
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and connection.laddr
        if not connection.laddr.ip.startswith("127.")
        and connection.laddr.ip not in ("::1", "::ffff:127.0.0.1")
    }


def memory_has(process: psutil.Process, wanted: list[bytes]) -> list[bytes]:
    """Return which of these byte strings occur in a process's writable memory."""
    found: set[bytes] = set()
    with open(f"/proc/{process.pid}/maps") as maps, open(f"/proc/{process.pid}/mem", "rb", 0) as memory:
        for line in maps:
            span, mode, *_ = line.split()
            start, end = (int(each, 16) for each in span.split("-"))
            if mode.startswith("rw"):
                memory.seek(start)
                with contextlib.suppress(OSError):  # a device
                    content = memory.read(end - start)
                    found.update(each for each in wanted if each in content)
    return sorted(found)
