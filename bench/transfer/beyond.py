"""`tcp` within TLS, and Ray's object store: for networks that are not trusted, or that let little through."""

from __future__ import annotations

import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray

from bench.transfer.certificates import Authority
from bench.transfer.figures import Figure
from bench.transfer.process import Remote
from bench.transfer.raw import MODEL_BLOCK, measure
from bench.transfer.sides import Pair
from deploy.actors import CONCURRENCY
from deploy.cleanup import make_directory, remove_directory
from deploy.ray_carrier import RayCarrier
from deploy.ray_cluster import object_store_bytes
from kvtransfer.transports import TransportOptions
from protocol.config import ServeConfig


class Actor:
    """Holds one side; its methods are what `RayCarrier` asks of an actor, and ours."""

    def __init__(self) -> None:
        self._carrier = RayCarrier()

    def make(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._object = make(*arguments, TransportOptions(carrier=self._carrier))

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._object, method)(*arguments)

    def deliver(self, kind: str, parcel: bytes, objects: list[Any]) -> bool:
        return self._carrier.receive(kind, parcel, objects)

    def until_ended(self) -> None:
        """`RayCarrier` watches this call: it ends with the actor."""
        threading.Event().wait()


class ActorObject:
    """As `Remote`, in a Ray actor; what is made there is given `TransportOptions` with its carrier."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        kind = ray.remote(max_restarts=0, max_task_retries=0, **CONCURRENCY)(Actor)
        self._actor = kind.options(name=f"side-{secrets.token_hex(8)}", num_cpus=0).remote()
        ray.get(self._actor.make.remote(make, arguments))

    def begin(self, method: str, *arguments: Any) -> None:
        self._called = self._actor.call.remote(method, arguments)

    def end(self) -> Any:
        return ray.get(self._called)

    def call(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call("close")
        ray.kill(self._actor)


def tls(repeats: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        options = TransportOptions(tls=Authority(Path(folder) / "authority").issue("worker"))
        start = partial(_with_options, options)
        yield from measure("tcp", Pair.raw_stream, "raw stream", {MODEL_BLOCK: None}, repeats, start, "TLS")


def object_store(repeats: int) -> Iterator[Figure]:
    with running_ray():
        targets: dict[int, float | None] = {MODEL_BLOCK: None}
        yield from measure("object_store", Pair.raw_stream, "raw stream", targets, repeats, ActorObject)


def _with_options(options: TransportOptions, make: Callable[..., Any], *arguments: Any) -> Remote:
    return Remote(make, *arguments, options)


@contextmanager
def running_ray() -> Iterator[None]:
    """A local cluster like that of `tandem serve`; its token is Ray's own affair."""
    directory = make_directory()
    ray.init(
        namespace="tandem-transfer",
        num_cpus=0,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=object_store_bytes(ServeConfig(kv_transports="object_store")),
        _temp_dir=str(directory),
        _node_ip_address="127.0.0.1",
    )
    try:
        yield
    finally:
        ray.shutdown()
        remove_directory(directory)
