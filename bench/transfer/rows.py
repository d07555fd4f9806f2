"""Functions that measure a row, by name. Each gets the number of rounds and yields its figures one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.transfer.accuracy import int8
from bench.transfer.figures import Figure
from bench.transfer.idle import idle
from bench.transfer.link import link
from bench.transfer.nixl import ucx
from bench.transfer.raw import shm, tcp, tls


def object_store(repeats: int) -> Iterator[Figure]:
    from bench.transfer.object_store import object_store as measure  # the other rows do not need Ray

    return measure(repeats)


MEASURES: dict[str, Callable[[int], Iterator[Figure]]] = {
    "shm": shm,
    "tcp": tcp,
    "tls": tls,
    "ucx": ucx,
    "object_store": object_store,
    "idle": idle,
    "int8": int8,
    "link": link,
}
