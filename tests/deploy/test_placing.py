"""Which nodes get workers, and which nodes a start waits for."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.ray_cluster import RayCluster, RayStartError
from deploy.slot_actors import NODES_S, SET_UP_S, Placing
from deploy.slots import Node, choose, make_slots
from protocol.config import ServeConfig


def test_a_start_waits_longer_for_hosts_that_are_set_up() -> None:
    """A start waits for hosts that are being set up, but not for one that does not answer."""
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


def test_a_worker_of_several_ranks_needs_a_gpu_for_each_on_one_node() -> None:
    config = ServeConfig(prefill_tensor_parallel_size=2, decode_tensor_parallel_size=4)
    nodes = [node("1", gpus=2), node("2", gpus=5), node("3", cores=64)]
    cluster: Any = SimpleNamespace(nodes=lambda: nodes, sets_up_nodes=False)
    slots = make_slots(config)
    placing = Placing(config, cluster, slots)
    placing.look(time.monotonic())
    found = [placing.find(slot, time.monotonic()) and slot.node for slot in reversed(slots)]
    assert found == [nodes[1], nodes[0]], "the second has one GPU left"
    slots[0].node = slots[1].node = None
    nodes[1] = node("2", gpus=3)
    placing.look_at_once(time.monotonic())
    assert not placing.find(slots[1], time.monotonic()), "no node has four"


def node(name: str, cores: int = 4, gpus: float = 0.0, **roles: int) -> Node:
    return Node(name, f"10.0.0.{name}", cores, gpus, roles)


def place(roles: list[str], nodes: list[Node], distrusted: tuple[str, ...] = ()) -> list[str]:
    """Place the roles one after the other. A role without room gives ""."""
    held: dict[str, list[str]] = {each.node_id: [] for each in nodes}
    chosen = []
    for role in roles:
        found = choose(role, nodes, held, distrusted)
        chosen.append(found.node_id if found is not None else "")
        if found is not None:
            held[found.node_id].append(role)
    return chosen


def test_ray_describes_a_node() -> None:
    resources = {"CPU": 7.0, "prefill": 2.0, "memory": 1e9, "node:10.0.0.5": 1.0}
    found = Node.of({"NodeID": "abc", "NodeManagerAddress": "10.0.0.5", "Resources": resources})
    assert found == Node("abc", "10.0.0.5", 7, 0.0, {"prefill": 2})
    assert str(found) == "10.0.0.5 (7 cores, prefill: 2)"


def test_workers_are_spread_over_nodes_without_roles() -> None:
    assert place(["prefill", "prefill", "decode", "decode"], [node("a"), node("b")]) == ["a", "b", "a", "b"]
    assert place(["prefill", "decode", "decode"], [node("a", cores=2), node("b", cores=8)]) == ["b", "b", "b"]


def test_a_node_takes_only_its_roles_up_to_their_number() -> None:
    nodes = [node("p", prefill=1), node("d", decode=2), node("any")]
    assert place(["decode", "decode", "prefill"], nodes) == ["d", "any", "p"]
    assert place(["decode"] * 3 + ["draft"], nodes[:2]) == ["d", "d", "", ""]


def test_a_head_without_cores_takes_none() -> None:
    assert place(["prefill"], [node("head", cores=0)]) == [""]


def test_if_some_nodes_have_gpus_only_they_take_workers() -> None:
    assert place(["prefill", "decode"], [node("cpu", cores=64), node("gpu", gpus=1)]) == ["gpu", "gpu"]


def test_a_node_that_does_not_answer_comes_last() -> None:
    assert place(["decode", "decode"], [node("a", cores=8), node("b")], ("a",)) == ["b", "b"]
    assert place(["decode"], [node("a")], ("a",)) == ["a"], "none other is left"


def test_a_worker_of_several_ranks_needs_a_core_for_each() -> None:
    nodes = [node("a", cores=2), node("b", cores=4)]
    held = {"b": ["decode"] * 3}
    chosen = [choose("decode", nodes, held, (), ranks) for ranks in (1, 2, 4, 8)]
    assert [each.node_id for each in chosen if each is not None] == ["a", "a", "b", "a"]


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "ray://127.0.0.1:{port}", "127.0.0.1:many"])
def test_an_address_where_no_ray_listens_is_named_at_once(address: str) -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        asked = address.format(port=bound.getsockname()[1])
        with pytest.raises(RayStartError, match=f"^--ray-address {asked}: cannot reach "):
            RayCluster(ServeConfig(ray_address=asked)).link_host()
