"""Files that nobody else may have put there."""

from __future__ import annotations

import os
from pathlib import Path


def check_own(path: Path) -> None:
    """Raise PermissionError unless only this user (or root) can have written the file or folder."""
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{path} belongs to user {status.st_uid}")
    if status.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by others (mode {status.st_mode & 0o777:o})")
