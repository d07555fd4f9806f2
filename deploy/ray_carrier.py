"""Ray as the carrier of the `object_store` transport: objects in its store, references in actor calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from kvtransfer.transports.object_store import Inboxes, Reference, SendObject


class RayCarrier:
    """Within an actor that has a name. Its peers are actors of `WorkerActor`'s kind in the same namespace.

    Ray's own authentication decides who may call an actor, and reading an object means to unpickle what Ray
    packed it in: who has access to a Ray cluster is trusted by everybody in it.
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
            """A peer that is gone is noticed on the connection."""
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
