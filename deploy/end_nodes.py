"""Ends Ray on all hosts of a cluster except this one, the head: python -m deploy.end_nodes PORT

`ray down` does not end nodes on listed hosts, which would then outlive their head for a while.
"""

from __future__ import annotations

import sys
import time

from ray._raylet import GcsClient  # type: ignore[attr-defined]

GONE_S = 5.0
_ALIVE = 0


def end_nodes(address: str) -> list[str]:
    """End all other nodes. Returns the hosts that still have a node after `GONE_S`."""
    client = GcsClient(address=address)

    def others() -> dict[bytes, str]:
        nodes = client.get_all_node_info().items()
        return {
            node_id.binary(): str(node.node_manager_address)
            for node_id, node in nodes
            if node.state == _ALIVE and not node.is_head_node
        }

    client.drain_nodes(list(others()))
    deadline = time.monotonic() + GONE_S
    while (left := others()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return list(left.values())


if __name__ == "__main__":
    for host in end_nodes(f"127.0.0.1:{sys.argv[1]}"):
        print(f"Ray is left on {host}: it did not end within {GONE_S:g} s", file=sys.stderr)
