from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.arena import Arena
from tests.faults.network import Network, why_not
from tests.faults.points import CONVERTING
from tests.faults.processes import Stock


@pytest.fixture(scope="session")
def stock() -> Iterator[Stock]:
    stock = Stock()
    yield stock
    stock.close()


@pytest.fixture
def transport() -> str:
    """Name the transport. The tests' parameters override this."""
    return "tcp"


@pytest.fixture
def point() -> str:
    """Name the point at which a fault strikes. The tests' parameters override this."""
    return ""


@pytest.fixture
def arena(stock: Stock, transport: str, point: str) -> Iterator[Arena]:
    arena = Arena(stock, (transport,))
    arena.converting = point in CONVERTING
    yield arena
    arena.close()


@pytest.fixture(scope="session")
def networks_work() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def network(networks_work: None) -> Iterator[Network]:
    network = Network()
    yield network
    network.close()
