"""Ray as the carrier of the `object_store` transport: calls to the peers' actors, and Ray's object store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from deploy.actors import PARCELS, WATCH
from kvtransfer.object_store.carrier import Handler, Reference

log = logging.getLogger(__name__)


class RayCarrier:
    """Within an actor that has a name. Its peers are actors of `WorkerActor`'s kind in the same namespace.

    Ray's own authentication decides who may call an actor, and reading an object means to unpickle what Ray
    packed it in: who has access to a Ray cluster is trusted by everybody in it.
    """

    def __init__(self) -> None:
        self.address: str = ray.get_runtime_context().get_actor_name()
        self._handlers: dict[str, Handler] = {}
        self._actors: dict[str, Any] = {}
        self._done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._tell, name="ray-carrier", daemon=True).start()

    def handle(self, kind: str, handler: Handler) -> None:
        self._handlers[kind] = handler

    def receive(self, kind: str, parcel: bytes, objects: list[Reference]) -> bool:
        """What the actor's `deliver` does."""
        handler = self._handlers.get(kind)
        return handler is not None and handler(parcel, objects)

    def deliver(
        self,
        address: str,
        kind: str,
        parcel: bytes,
        objects: Sequence[Reference],
        on_done: Callable[[str], None],
    ) -> None:
        try:
            deliver = self._actor(address).deliver.options(concurrency_group=PARCELS)
            taken = deliver.remote(kind, parcel, list(objects))
        except (OSError, RayError) as error:
            on_done(_first_line(error))
            return
        self._when_done(taken, lambda future: on_done(_outcome(future)))

    def watch(self, address: str, on_lost: Callable[[str], None]) -> None:
        until_ended = self._actor(address).until_ended.options(concurrency_group=WATCH)

        def ended(future: Future[None]) -> None:
            self._actors.pop(address, None)
            on_lost(address)

        self._when_done(until_ended.remote(), ended)

    def put(self, buffers: Sequence[memoryview]) -> Reference:
        try:
            return ray.put([np.frombuffer(buffer, np.uint8) for buffer in buffers])
        except RayError as error:
            raise OSError(f"the object store takes no more: {_first_line(error)}") from error

    def is_here(self, reference: Reference, timeout_s: float) -> bool:
        try:
            return bool(ray.wait([reference], timeout=timeout_s, fetch_local=True)[0])
        except RayError as error:
            raise OSError(f"an object is lost: {_first_line(error)}") from error

    def get(self, reference: Reference) -> list[memoryview]:
        try:
            return [memoryview(array) for array in ray.get(reference)]
        except RayError as error:
            raise OSError(f"an object is lost: {_first_line(error)}") from error

    def _when_done(self, result: Reference, callback: Callable[[Future[Any]], None]) -> None:
        """Call back in a thread of our own: one that asks Ray for something would stop Ray's for ever."""
        result.future().add_done_callback(lambda future: self._done.put(partial(callback, future)))

    def _tell(self) -> None:
        while True:
            try:
                self._done.get()()
            except Exception:
                log.exception("a callback failed")

    def _actor(self, address: str) -> Any:
        actor = self._actors.get(address)
        if actor is None:
            try:
                actor = self._actors[address] = ray.get_actor(address)
            except ValueError as error:
                raise ConnectionRefusedError(f"there is no actor {address}") from error
        return actor


def _outcome(future: Future[bool]) -> str:
    error = future.exception()
    if error is not None:
        return _first_line(error)
    return "" if future.result() else "the peer has ended it"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]
