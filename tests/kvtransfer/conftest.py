from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.kvtransfer.transfer_sides import close_memories


@pytest.fixture(autouse=True)
def _memories_closed() -> Iterator[None]:
    yield
    close_memories()


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Return a function that registers an object to be closed after the test, and returns it."""
    opened: list[Any] = []

    def register(thing: Any) -> Any:
        opened.append(thing)
        return thing

    yield register
    for thing in reversed(opened):
        thing.close()
