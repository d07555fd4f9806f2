"""What a joined Ray cluster is taken for."""

from __future__ import annotations

from pathlib import Path

from deploy.ray_cluster import fixed_types, may_grow, sets_up_nodes

HOSTS = "available_node_types: {local.cluster.node: {min_workers: 2, max_workers: %d, resources: {}}}"
CLOUD = "available_node_types: {head: {max_workers: 12}, decode: {min_workers: 1, max_workers: 6}}"


def test_of_listed_hosts_there_are_never_more(tmp_path: Path) -> None:
    files = {"all": HOSTS % 2, "some": HOSTS % 3, "cloud": CLOUD}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert fixed_types(tmp_path / "all") == {"local.cluster.node"}
    assert {fixed_types(tmp_path / name) for name in ("some", "cloud", "missing")} == {frozenset()}


def test_hosts_that_are_set_up_are_told_from_those_that_do_not_answer() -> None:
    pending = ["192.0.2.11", "local.cluster.node"]
    for status, expected in {"waiting-for-ssh": False, "syncing-files": True, "setting-up": True}.items():
        assert sets_up_nodes({"pending_nodes": [[*pending, status]]}) == expected
    assert not sets_up_nodes({})


def test_without_an_autoscaler_no_node_comes() -> None:
    assert not may_grow({}) and not may_grow({"node_type_mapping": {"1": "node_1"}})
    assert may_grow({"node_type_mapping": {"1": "node_1", "2": "decode"}})
