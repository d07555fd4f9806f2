"""Closing leaves nothing behind, an idle pair costs nothing, and imports are few."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from kvtransfer.interface import Completed, RegisteredPool
from tests.faults.leftovers import held, more_than
from tests.kvtransfer.transfer_sides import RawPeer, ReceiverEnd, SenderEnd, close_memories, idle_cpu_seconds
from tests.waiting import wait_until

Closing = Callable[[Any], Any]


def wait_until_held(expected: dict[str, int]) -> None:
    """Wait until this much is held. Threads of a large pool or of a link may end a moment later."""
    wait_until(lambda: held() == expected, what=lambda: f"{held()}, {expected}")


def test_close_leaves_nothing_behind(transport: str) -> None:
    before = held()
    for _ in range(3):
        sender, receiver = SenderEnd([transport]), ReceiverEnd([transport, "tcp"])
        intruder = RawPeer.connect_only(receiver, transport)
        receiver.open("lease", [1])
        sender.push(receiver.peer, "lease", [1])
        assert isinstance(sender.wait_lease("lease"), Completed)
        assert {what.split()[0] for what in more_than(before)} == {"thread", "descriptor", "mapping"}
        sender.close()
        sender.sender.close()
        receiver.close()
        receiver.receiver.close()
        intruder.close()
        del sender, receiver, intruder
        close_memories()
    wait_until_held(before)


def test_a_dead_peers_link_leaves_nothing_behind(closing: Closing, transport: str) -> None:
    sender = closing(SenderEnd([transport]))
    before = held()
    for _ in range(3):
        receiver = ReceiverEnd([transport], RegisteredPool(memoryview(bytearray(2 * 4096)), 4096, 2))
        receiver.open("lease", [1])
        sender.push(receiver.peer, "lease", [1], final=False)
        sender.wait_for(lambda event: True)
        receiver.close()
        sender.wait_lease("lease")
        del receiver
    wait_until_held(before)


def test_close_does_not_wait_for_a_peer_that_does_not_answer(transport: str) -> None:
    receiver = ReceiverEnd([transport], handshake_timeout_s=60.0)
    sender = SenderEnd([transport], connect_timeout_s=60.0)
    silent = RawPeer.connect_only(receiver, transport)
    receiver.receiver.close()
    began = time.monotonic()
    sender.sender.connect(receiver.peer)
    sender.close()
    receiver.close()
    silent.close()
    assert time.monotonic() - began < 20


def test_an_idle_pair_costs_nothing(closing: Closing, transport: str) -> None:
    sender, receiver = closing(SenderEnd([transport])), closing(ReceiverEnd([transport]))
    receiver.open("lease", [1])
    sender.push(receiver.peer, "lease", [1])
    sender.wait_lease("lease")
    receiver.wait_lease("lease")
    assert idle_cpu_seconds(0.5) < 0.0025


def test_it_imports_neither_ray_nor_zmq_nor_fastapi() -> None:
    code = "import sys, kvtransfer; print(*{'ray', 'zmq', 'fastapi', 'engine'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == ""
