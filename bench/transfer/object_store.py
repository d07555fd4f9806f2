"""Ray's object store between two actors, against one raw stream on loopback."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from bench.transfer.process import RemoteObject
from bench.transfer.raw import MODEL_BLOCK, measure
from bench.transfer.row import TransferRow
from bench.transfer.sides import Pair
from deploy.actors import CONCURRENCY, OBJECTS
from deploy.local_ray import start
from deploy.processes import PrivateDirectory
from deploy.ray_carrier import RayCarrier
from deploy.ray_cluster import object_store_bytes
from kvtransfer.transports.registry import TransportOptions
from protocol.config import ServeConfig


class CarrierActor:
    """The methods that `RayCarrier` calls on an actor."""

    def __init__(self) -> None:
        self.carrier = RayCarrier()

    @ray.method(concurrency_group=OBJECTS)
    def deliver(self, inbox_id: str, number: int, references: list[Any]) -> None:
        self.carrier.inboxes.put(inbox_id, number, references[0])


def start_actor(kind: type[CarrierActor], role: str) -> Any:
    """Start an actor. Return its handle."""
    actor = ray.remote(max_restarts=0, max_task_retries=0, **CONCURRENCY)(kind)
    return actor.options(name=f"{role}-{secrets.token_hex(8)}", num_cpus=0).remote()


class SideActor(CarrierActor):
    def make(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._object = make(*arguments, TransportOptions(carrier=self.carrier))

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._object, method)(*arguments)


class ActorObject(RemoteObject):
    """An object in a Ray actor. `make` receives `TransportOptions` with the actor's carrier."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._actor = start_actor(SideActor, "side")
        ray.get(self._actor.make.remote(make, arguments))

    def begin(self, method: str, *arguments: Any) -> None:
        self._called = self._actor.call.remote(method, arguments)

    def end(self) -> Any:
        return ray.get(self._called)

    def close(self) -> None:
        self.call("close")
        ray.kill(self._actor)


def object_store(repeats: int) -> Iterator[TransferRow]:
    with running_ray():
        targets: dict[int, float | None] = {MODEL_BLOCK: None}
        yield from measure("object_store", Pair.raw_stream, "raw stream", targets, repeats, ActorObject)


@contextmanager
def running_ray() -> Iterator[None]:
    """Start a local cluster like that of `tandem serve`; Ray makes its token itself."""
    config, directory = ServeConfig(kv_transports="object_store"), PrivateDirectory()
    # By default actors have a lower priority than all other processes of the host.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options = {
        "namespace": "tandem-transfer",
        "num_cpus": 0,
        "include_dashboard": False,
        "logging_level": "ERROR",
        "log_to_driver": False,
        "object_store_memory": object_store_bytes(config),
        "_temp_dir": str(directory.path),
        "_node_ip_address": "127.0.0.1",
    }
    start(options, config.start_timeout, threading.Event())
    try:
        yield
    finally:
        ray.shutdown()
        directory.remove()
