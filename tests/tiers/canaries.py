"""Expensive tests that the fast tier always runs: each shows that one way to serve works from end to end."""

from __future__ import annotations

CANARIES: dict[str, str] = {}
