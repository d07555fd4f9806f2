"""Looks at processes that may end at any moment."""

from __future__ import annotations

import psutil


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
