"""Handles signals while the router's own handlers are not installed, and reports why the server ends."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from types import FrameType
from typing import NoReturn

from deploy.processes import kill_descendants
from protocol.config import ServeConfig

log = logging.getLogger(__name__)


class Patience:
    """The handler of signals while the router's own handlers are not installed.

    Before Ray's start, a signal ends the process at once, since an exception could get lost in a callback of
    the import system. During an orderly shutdown, a signal cuts it short.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self.started = self.asked = False
        self.ending = False
        self.over = threading.Event()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.ending:
            self.over.set()
        elif self.started:
            raise KeyboardInterrupt
        else:
            kill_descendants()
            leave_unready(self._config)


def leave_unready(config: ServeConfig) -> NoReturn:
    """End the process at once, without waiting for Ray's other threads."""
    complain(config, "stopped before the server was ready")
    os._exit(130)


def complain(config: ServeConfig, reason: str) -> None:
    """Report why the server ends, unless the terminal is gone."""
    if config.log_format == "json":
        log.error("%s", reason)
    else:
        with contextlib.suppress(OSError):
            print(f"tandem: {reason}", file=sys.stderr, flush=True)
