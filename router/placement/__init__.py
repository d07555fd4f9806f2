"""Placement policies, by name."""

from __future__ import annotations

from protocol.errors import ConfigError
from router.placement.interface import PlacementPolicy
from router.placement.least_loaded import least_loaded

POLICIES: dict[str, PlacementPolicy] = {"least_loaded": least_loaded}


def placement_policy(name: str) -> PlacementPolicy:
    """Raises `ConfigError` for a name that isn't known."""
    if name not in POLICIES:
        raise ConfigError(f"--placement: unknown policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
