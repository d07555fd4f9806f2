"""Free TCP ports for servers that need a port number."""

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

from native.ownership import check_own, open_own

HOST = "127.0.0.1"

_PORTS = range(20_000, 32_000)
"""Below the ports that Linux gives to outgoing connections and to sockets bound to port 0."""

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
        if port not in _held and _take(folder / str(port), port):
            return port
    raise RuntimeError(f"no free port in {_PORTS.start} to {_PORTS.stop - 1}")


def _take(path: Path, port: int) -> bool:
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
