"""The folder for what is made once for a user and a host, such as libraries."""

from __future__ import annotations

import os
from pathlib import Path

from native.ownership import check_own


def cache_dir() -> Path:
    """Return TANDEM_CACHE_DIR, or ~/.cache/tandem."""
    return Path(os.environ.get("TANDEM_CACHE_DIR") or Path.home() / ".cache" / "tandem")


def own_folder(folder: Path) -> Path:
    """Return the folder, made if it is not there. Raises OSError, also if others may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(folder)
    return folder
