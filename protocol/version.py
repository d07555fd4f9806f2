"""The installed version, and that of what processes say to each other."""

from __future__ import annotations

from importlib import metadata

PROTOCOL = 3
"""Of the messages between processes. Raise it when a router and a worker from before and after a change could
not work together.
"""


def version() -> str:
    """Of the installed distribution; a source tree that is not installed has none."""
    try:
        return metadata.version("tandem-serve")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def protocol_problem(protocol: int, release: str, us: str, them: str) -> str:
    """Why `us` cannot talk to `them`, who are of another `protocol` and `release`; "": we can."""
    if protocol == PROTOCOL:
        return ""
    return f"{us} (Tandem {version()}) speaks protocol {PROTOCOL}, {them} (Tandem {release}) {protocol}"
