"""`python stall_server.py CONFIG FILE`: a router that records in a file how long its event loop stood still.

Its keys come on stdin; its URL and its workers' endpoint go to stdout. A stall is the CPU time that the
process used between two turns of the loop. So a busy host causes no stall, but a thread that holds the
interpreter lock does.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
import time

import msgspec

from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from router.server import RouterServer

TICK_S = 0.002


class StallMonitor:
    """Keeps the longest stall in the file's first eight bytes, until the test overwrites it."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._view = mmap.mmap(file.fileno(), 8)
        self._at, self._cpu_s = time.monotonic(), time.process_time()

    def tick(self) -> None:
        at, cpu_s = time.monotonic(), time.process_time()
        stall_s = min(at - self._at - TICK_S, cpu_s - self._cpu_s)
        if stall_s > struct.unpack("d", self._view[:8])[0]:
            self._view[:8] = struct.pack("d", stall_s)
        self._at, self._cpu_s = at, cpu_s
        asyncio.get_running_loop().call_later(TICK_S, self.tick)


def main(config: str, path: str) -> None:
    keys = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClusterKeys)
    server = RouterServer(msgspec.json.decode(config, type=ServeConfig), keys)

    def started() -> None:
        StallMonitor(path).tick()
        print(server.url, server.state.link.endpoint, flush=True)

    server.run(started)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
