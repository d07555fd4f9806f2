"""What a joined Ray cluster is taken for."""

from __future__ import annotations

from pathlib import Path

from deploy.ray_cluster import fixed_types

HOSTS = "available_node_types: {local.cluster.node: {min_workers: 2, max_workers: %d, resources: {}}}"
CLOUD = "available_node_types: {head: {max_workers: 12}, decode: {min_workers: 1, max_workers: 6}}"


def test_of_listed_hosts_there_are_never_more(tmp_path: Path) -> None:
    files = {"all": HOSTS % 2, "some": HOSTS % 3, "cloud": CLOUD}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert fixed_types(tmp_path / "all") == {"local.cluster.node"}
    assert {fixed_types(tmp_path / name) for name in ("some", "cloud", "missing")} == {frozenset()}
