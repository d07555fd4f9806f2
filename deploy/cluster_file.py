"""Checks the file given to `ray up` before the head starts: python -m deploy.cluster_file FILE"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from protocol.errors import ConfigError
from protocol.roles import ROLES

_RAYS_OWN = ("CPU", "GPU", "TPU", "memory", "object_store_memory")


def check_cluster_file(text: str) -> None:
    """Raise `ConfigError` if a node type has an unknown role: its nodes would get no workers."""
    for name, kind in yaml.safe_load(text).get("available_node_types", {}).items():
        for resource in kind.get("resources") or ():
            if resource not in (*_RAYS_OWN, *ROLES) and ":" not in resource:
                known = ", ".join((*_RAYS_OWN, *ROLES))
                raise ConfigError(f"available_node_types: {name}: resources: {resource!r} is none of {known}")


if __name__ == "__main__":
    try:
        check_cluster_file(Path(sys.argv[1]).read_text())
    except ConfigError as error:
        sys.exit(f"node.sh: {error}")
