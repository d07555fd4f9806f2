"""The installed version."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Of the installed distribution; a source tree that is not installed has none."""
    try:
        return metadata.version("tandem-serve")
    except metadata.PackageNotFoundError:
        return "(not installed)"
