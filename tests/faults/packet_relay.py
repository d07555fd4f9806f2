"""Delays IP packets and drops some of them, like `netem`, for kernels without it.

    python -m tests.faults.packet_relay DELAY_S LOSS MTU

Makes the TUN device `DEVICE` in its network namespace: packets routed there come back from there. Prints
"ready" then, and the number of dropped packets when its input ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque

DEVICE = "relay"
_TUN = "/dev/net/tun"
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_AT_ONCE = 64
"""The most packets to read before sending the packets that are due."""


def why_not() -> str:
    """Return why no relay can be made here, or an empty string."""
    return "" if os.path.exists(_TUN) else f"there is no {_TUN}"


def open_device(mtu: str) -> int:
    """Return a descriptor of the device: each read and write is one packet."""
    descriptor = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN_WITHOUT_HEADER))
    up = ["ip", "link", "set", DEVICE, "mtu", mtu, "txqueuelen", "10000", "up"]
    subprocess.run(up, check=True)
    return descriptor


def relay(device: int, delay_s: float, loss: float, mtu: int) -> int:
    """Relay packets until the input ends. Return the number of dropped packets."""
    chance = random.Random(0)
    lost = 0
    waiting: deque[tuple[float, bytes]] = deque()
    while True:
        patience = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        ready, _, _ = select.select([device, sys.stdin], [], [], patience)
        if sys.stdin in ready:
            return lost
        with contextlib.suppress(BlockingIOError):
            for _ in range(_AT_ONCE if ready else 0):
                packet = os.read(device, mtu)
                if chance.random() < loss:
                    lost += 1
                else:
                    waiting.append((time.monotonic() + delay_s, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(device, waiting.popleft()[1])


if __name__ == "__main__":
    delay_s, loss, mtu = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    device = open_device(str(mtu))
    print("ready", flush=True)
    print(relay(device, delay_s, loss, mtu), flush=True)
