"""Looks at processes that may end at any moment."""

from __future__ import annotations

import os
import signal
import time

import psutil


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal. A stopped process has really stopped on return, also on another core."""
    os.kill(pid, number)
    while number == signal.SIGSTOP and psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
