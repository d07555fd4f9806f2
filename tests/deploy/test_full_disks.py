"""A server whose /dev/shm is full, and whose output goes to a full disk, starts and serves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.deploy.server_process import ANSWER_S, ServerProcess

FULL = """
import ctypes, os, subprocess
assert ctypes.CDLL(None).unshare(0x20000) == 0  # the mounts below are the server's own
mounts = "mount --make-rprivate / && mount -t tmpfs -o size=1m tmpfs /dev/shm"
subprocess.run(f"{mounts} && head -c 1m /dev/zero > /dev/shm/other", shell=True, check=True)
os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_neither_a_full_shm_nor_a_full_output_stops_a_server(tiny_folder: Path, tmp_path: Path) -> None:
    """Pools are files without a name, which no limit of /dev/shm counts."""
    with ServerProcess(tiny_folder, tmp_path / "log", prelude=FULL) as server:
        server.wait_ready()
        assert "standard output: [Errno 28] No space left on device" in server.log
        expected = server.complete([5, 6, 7], max_tokens=20).json()["choices"]
        for worker in server.workers().values():
            os.kill(worker["pid"], signal.SIGKILL)
        assert server.complete([5, 6, 7], max_tokens=20).json()["choices"] == expected
        server.wait(lambda: httpx.get(f"{server.url}/ready", timeout=ANSWER_S).is_success, 60)
