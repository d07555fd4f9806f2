"""Runs senders and receivers in actors of a real Ray, with the object store between them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import ray

from bench.transfer.object_store import CarrierActor
from kvtransfer.transports.registry import TransportOptions
from tests.kvtransfer.transfer_sides import ReceiverEnd, SenderEnd, close_memories, make_pool
from tests.waiting import wait_until

ANSWER_S = 120.0


class Side(CarrierActor):
    """One side of a transfer, inside an actor."""

    end: Any = None

    def pid(self) -> int:
        return os.getpid()

    def start(self, role: str, num_blocks: int, block_bytes: int, seed: int, **options: Any) -> Any:
        pool = make_pool(num_blocks, block_bytes, seed)
        wire = TransportOptions(carrier=self.carrier)
        kind = SenderEnd if role == "sender" else ReceiverEnd
        self.end = kind(["object_store"], pool, wire, **options)
        return None if role == "sender" else self.end.peer

    def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self.end, *arguments)

    def close(self) -> list[str]:
        """Close everything. Return our own threads that are left."""
        if self.end is not None:
            self.end.close()
        self.end = None
        close_memories()
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


class RemoteSide:
    """A handle of a `Side` in an actor."""

    def __init__(
        self, actor: Any, role: str, num_blocks: int, block_bytes: int, seed: int, **options: Any
    ) -> None:
        self.actor = actor
        self.is_alive = True
        self.pid = ray.get(self.actor.pid.remote(), timeout=ANSWER_S)
        self._options = (role, num_blocks, block_bytes, seed), options
        self.start()

    def start(self) -> None:
        """Start the side again after a `close`."""
        arguments, options = self._options
        self.peer = ray.get(self.actor.start.remote(*arguments, **options), timeout=ANSWER_S)

    def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `function(end, *arguments)` in the actor."""
        return ray.get(self.actor.apply.remote(function, *arguments), timeout=ANSWER_S)

    def close(self) -> list[str]:
        return ray.get(self.actor.close.remote(), timeout=ANSWER_S)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.is_alive = False


def stored_bytes() -> int:
    """Return the number of bytes in the object store."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return int(total["object_store_memory"] - free.get("object_store_memory", 0))


def wait_stored(expected: Callable[[int], bool]) -> None:
    wait_until(lambda: expected(stored_bytes()), what=lambda: f"{stored_bytes()} bytes are in the store")
