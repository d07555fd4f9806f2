"""Threads, memory and GPUs of workers, and the nodes that get workers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.config import load_config
from deploy.ray_cluster import RayCluster, RayStartError
from deploy.resources import CACHED_PRODUCTS, check_heads, choose_threads, plan_workers, thread_environment
from deploy.slot_actors import NODES_S, SET_UP_S, Placing
from deploy.slots import Node, choose, make_slots
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.speculation import SpeculativeConfig


@pytest.mark.parametrize(
    ("cores", "changes", "threads"),
    [
        (2, {}, 1),
        (2, {"disaggregation": False}, 2),
        (16, {}, 8),
        (16, {"prefill_replicas": 3, "decode_replicas": 2}, 3),
        (1, {"prefill_replicas": 3}, 1),
        (2, {"worker_threads": 5}, 5),
    ],
)
def test_threads(cores: int, changes: dict[str, Any], threads: int) -> None:
    assert choose_threads(ServeConfig(**changes), cores)[0] == threads


MULTIPLY = """
import torch

def resident_mb():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6

pack, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
weights = [pack(torch.zeros(size, 64), 64) for size in (64, 128, 192, 256)]
with torch.inference_mode():
    for rows in range(1, {last} + 1):
        for weight in weights:
            multiply(torch.zeros(rows, 64), weight, None, "none", [], "")
        if rows == {full}:
            before = resident_mb()
print(resident_mb() - before)
"""


def test_compiled_products_do_not_fill_the_memory() -> None:
    """Once the caches are full, new numbers of rows take 73 to 88 MB, not 185 as without a bound."""
    full = CACHED_PRODUCTS // 4
    program = MULTIPLY.format(full=full, last=full + 240)
    environment = os.environ | thread_environment(1)
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
    )
    assert float(found.stdout) < 130


def test_plan_on_a_cpu() -> None:
    config, gpus = plan_workers(ServeConfig(), num_gpus=0, cores=4)
    assert gpus == 0
    assert (config.device, config.worker_threads, config.disaggregation) == ("cpu", 2, True)
    assert config.gpu_memory_utilization == pytest.approx(0.45), "the two share the host's memory"
    config, gpus = plan_workers(ServeConfig(device="cpu"), num_gpus=8, cores=4)
    assert (config.device, gpus) == ("cpu", 0)


def test_plan_on_one_of_several_nodes() -> None:
    """Workers on a node share its threads, memory and GPUs."""
    eight = ServeConfig(prefill_replicas=4, decode_replicas=4)
    config, _ = plan_workers(eight, num_gpus=0, cores=16, workers=1)
    assert (config.worker_threads, config.gpu_memory_utilization) == (16, 0.9)
    config, gpus = plan_workers(eight, num_gpus=1, cores=16, workers=2)
    assert (config.worker_threads, gpus, config.gpu_memory_utilization) == (8, 0.5, 0.45)


@pytest.mark.parametrize(
    ("gpus", "workers", "each"),
    [(1, 2, 1 / 2), (2, 3, 1 / 2), (3, 4, 1 / 2), (3, 5, 1 / 2), (1, 6, 1 / 6), (2, 5, 1 / 3), (8, 5, 1)],
)
def test_plan_on_gpus(gpus: int, workers: int, each: float) -> None:
    """Ray, which counts in parts of 1/10000, has room for all shares, and each GPU's memory suffices."""
    config, share = plan_workers(ServeConfig(decode_replicas=workers - 1), num_gpus=gpus, cores=16)
    assert (config.device, config.disaggregation) == ("cuda", True)
    assert share == pytest.approx(each, abs=1e-4)
    assert gpus * int(1 / share) >= workers
    assert round(share * 10_000) * round(1 / each) <= 10_000
    assert config.gpu_memory_utilization == pytest.approx(0.9 * share)


def test_cuda_without_a_gpu_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--device"):
        plan_workers(ServeConfig(device="cuda"), num_gpus=0, cores=4)


def test_threads_are_divided_among_ranks_and_memory_among_workers() -> None:
    ranks = ServeConfig(decode_tensor_parallel_size=3)
    assert choose_threads(ranks, 8) == (2, "8 cores for 4 ranks")
    config, _ = plan_workers(ranks, num_gpus=0, cores=8)
    assert (config.worker_threads, config.gpu_memory_utilization) == (2, 0.45)
    config, _ = plan_workers(ranks, num_gpus=0, cores=6, workers=1, ranks=3)
    assert config.worker_threads == 2
    with pytest.raises(ConfigError, match=r"--decode-tensor-parallel-size: 3 is above 1.* GPU"):
        plan_workers(ranks, num_gpus=1, cores=8)


@pytest.mark.parametrize(("gpus", "ranks"), [(4, None), (2, 2)])
def test_each_rank_takes_a_gpu(gpus: int, ranks: int | None) -> None:
    two = ServeConfig(prefill_tensor_parallel_size=2, decode_tensor_parallel_size=2)
    workers = None if ranks is None else 1
    config, share = plan_workers(two, num_gpus=gpus, cores=16, workers=workers, ranks=ranks)
    assert (config.device, share, config.gpu_memory_utilization) == ("cuda", 1.0, 0.9)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_disk_path": "kv"}, "--kv-disk-path on GPUs"),
        ({"compile": "off"}, "--compile off on GPUs"),
        ({"speculative_config": SpeculativeConfig(method="self_speculative")}, "self_speculative on GPUs"),
    ],
)
def test_options_that_exclude_ranks_on_gpus(options: dict[str, Any], reason: str) -> None:
    config = ServeConfig(decode_tensor_parallel_size=2, **options)
    with pytest.raises(ConfigError, match=f"--decode-tensor-parallel-size: 2 is above 1.*{reason}"):
        plan_workers(config, num_gpus=4, cores=8)


HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 90}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tmp_path)


def test_sizes_that_divide_the_attention_heads(model: str) -> None:
    flags = {"model": model, "prefill_tensor_parallel_size": 6, "decode_tensor_parallel_size": 3}
    config = load_config(flags, {})
    check_heads(config, HEADS)
    assert (config.num_workers, config.total_ranks) == (2, 9)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"decode_tensor_parallel_size": 0}, "--decode-tensor-parallel-size: .* from 1 to 64, got 0"),
        ({"decode_tensor_parallel_size": 65}, "--decode-tensor-parallel-size: .* from 1 to 64, got 65"),
        ({"decode_tensor_parallel_size": "two"}, "--decode-tensor-parallel-size: .*got 'two'"),
        ({"decode_tensor_parallel_size": 2, "compile": "on"}, "--decode-.*: 2 is above 1.*--compile on"),
        ({"decode_tensor_parallel_size": 2, "kv_transports": "object_store"}, "--decode-.*object_store"),
    ],
)
def test_other_sizes_are_refused_with_the_limit(model: str, flags: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config({"model": model, **flags}, {})


def test_sizes_must_divide_the_heads(model: str) -> None:
    with pytest.raises(ConfigError, match=r"--prefill-.*: 5 does not divide num_attention_heads.*, 12$"):
        check_heads(load_config({"model": model, "prefill_tensor_parallel_size": 5}, {}), HEADS)


def test_a_role_without_workers_needs_no_ranks(model: str) -> None:
    flags = {"model": model, "disaggregation": False, "prefill_tensor_parallel_size": 5}
    config = load_config(flags, {})
    check_heads(config, HEADS)
    assert config.total_ranks == 1


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
