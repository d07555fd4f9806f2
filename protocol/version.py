"""The installed version, and the version of the messages between processes."""

from __future__ import annotations

from importlib import metadata

PROTOCOL = 4
"""The messages' version. Raise it when releases before and after a change cannot work together."""


def version() -> str:
    """Return the installed distribution's version, or "(not installed)" in a bare source tree."""
    try:
        return metadata.version("tandem-serve")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def protocol_problem(protocol: int, release: str, us: str, them: str) -> str:
    """Return why `us` cannot talk to `them`, whose `protocol` and `release` are given, or ""."""
    if protocol == PROTOCOL:
        return ""
    return f"{us} (Tandem {version()}) speaks protocol {PROTOCOL}, {them} (Tandem {release}) {protocol}"
