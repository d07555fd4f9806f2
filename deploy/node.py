"""Steps of deploy/node.sh: `check FILE` reads the file given to `ray up`, `end PORT` ends Ray elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import yaml

from protocol.errors import ConfigError
from protocol.roles import ROLES

_RAYS_OWN = ("CPU", "GPU", "TPU", "memory", "object_store_memory")
GONE_S = 5.0
_ALIVE = 0


def check_cluster_file(text: str) -> None:
    """Raise `ConfigError` if a node type has an unknown role: its nodes would get no workers."""
    for name, kind in yaml.safe_load(text).get("available_node_types", {}).items():
        for resource in kind.get("resources") or ():
            if resource not in (*_RAYS_OWN, *ROLES) and ":" not in resource:
                known = ", ".join((*_RAYS_OWN, *ROLES))
                raise ConfigError(f"available_node_types: {name}: resources: {resource!r} is none of {known}")


def end_nodes(address: str) -> list[str]:
    """End all nodes but the head. Returns the hosts that still have a node after `GONE_S`.

    `ray down` does not end nodes on listed hosts, which would then outlive their head for a while.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]

    client = GcsClient(address=address)

    def others() -> dict[bytes, str]:
        nodes = client.get_all_node_info().items()
        rest = [(each, node) for each, node in nodes if node.state == _ALIVE and not node.is_head_node]
        return {node_id.binary(): str(node.node_manager_address) for node_id, node in rest}

    client.drain_nodes(list(others()))
    deadline = time.monotonic() + GONE_S
    while (left := others()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return list(left.values())


if __name__ == "__main__":
    step, value = sys.argv[1:]
    if step == "end":
        for host in end_nodes(f"127.0.0.1:{value}"):
            print(f"Ray is left on {host}: it did not end within {GONE_S:g} s", file=sys.stderr)
    else:
        try:
            check_cluster_file(Path(value).read_text())
        except ConfigError as error:
            sys.exit(f"node.sh: {error}")
