"""Carries the `object_store` transport over Ray: objects in its store, references in actor calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from kvtransfer.transports.object_store import Inboxes, Reference, SendObject


class RayCarrier:
    """A carrier of objects within a named actor. Its peers are `WorkerActor`s in the same namespace.

    Ray's own authentication decides who may call an actor, and reading an object unpickles what Ray packed it
    in. So all members of a Ray cluster must trust each other.
    """

    def __init__(self) -> None:
        self.address: str = ray.get_runtime_context().get_actor_name()
        self.inboxes = Inboxes()

    def sender_to(self, address: str, inbox_id: str) -> SendObject:
        try:
            deliver = ray.get_actor(address).deliver
        except (ValueError, RayError) as error:
            raise ConnectionRefusedError(f"there is no actor {address}") from error

        def send(number: int, buffers: Sequence[memoryview]) -> None:
            """Store the object and send its reference. Only the connection shows that a peer is lost."""
            try:
                stored = ray.put([np.frombuffer(buffer, np.uint8) for buffer in buffers])
                deliver.remote(inbox_id, number, [stored])
            except RayError as error:
                raise OSError(f"the object store takes no more: {_first_line(error)}") from error

        return send

    def get(self, reference: Reference, timeout_s: float) -> list[memoryview] | None:
        try:
            if not ray.wait([reference], timeout=timeout_s, fetch_local=True)[0]:
                return None
            arrays: list[Any] = ray.get(reference)
        except RayError as error:
            raise OSError(f"an object is lost: {_first_line(error)}") from error
        return [memoryview(array) for array in arrays]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
