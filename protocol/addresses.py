"""Classifies the addresses that a server listens on."""

from __future__ import annotations


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def is_wildcard(host: str) -> bool:
    return host in ("", "0.0.0.0", "::")
