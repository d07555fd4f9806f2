"""A server of the bundled model, for benchmarks that compare with no other system."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from bench.peers.process import Command, RunningSystem
from bench.peers.systems import free_port


@contextmanager
def serving(serve_options: Sequence[str], log_folder: Path | None = None) -> Iterator[httpx.Client]:
    """Start a server and yield a client once every worker is ready. Raises RuntimeError if it ends before
    that. `log_folder` keeps its log, `tandem.log`.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "deploy", "serve", "--port", str(port), *serve_options]
    with TemporaryDirectory() as temporary:
        folder = log_folder or Path(temporary)
        server = RunningSystem([Command("tandem", argv, f"{url}/ready")], folder, 300.0)
        with server, httpx.Client(base_url=url, timeout=300.0) as http:
            while "Listening on" not in (folder / "tandem.log").read_text():
                server.check()
                time.sleep(0.2)
            yield http
