"""Which nodes a start waits for."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from deploy.nodes import Node
from deploy.placing import NODES_S, SET_UP_S, Placing
from deploy.slots import make_slots
from protocol.config import ServeConfig


def test_a_start_waits_longer_for_hosts_that_are_set_up() -> None:
    """They are worth it, and one that does not answer is not."""
    config = ServeConfig(min_nodes=2)
    slots = make_slots(config)
    cluster: Any = SimpleNamespace(nodes=lambda: [Node("1", "192.0.2.11", 4)], sets_up_nodes=True)
    placing, began = Placing(config, cluster, slots), time.monotonic()
    placing.look(began)
    assert not placing.find(slots[0], began + NODES_S + 1)
    cluster.sets_up_nodes = False
    assert not placing.find(slots[0], began + NODES_S - 1)
    assert placing.find(slots[0], began + NODES_S + 1)
    cluster.sets_up_nodes = True
    assert placing.find(slots[0], began + SET_UP_S + 1)
