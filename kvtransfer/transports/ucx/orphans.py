"""Reads that were given up but may still write to our blocks."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack

from kvtransfer.transports.ucx.agent import Agent, Transfer

logger = logging.getLogger("tandem.kvtransfer")

_LOOK_S = 0.02


class OrphanedReads:
    """Polls such reads until they are over, then releases what they held.

    Its thread runs only while there are any. Each ends some day: UCX gives up a dead peer, and a frozen one
    goes on or dies.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._held: dict[Transfer, ExitStack] = {}
        self._watcher: threading.Thread | None = None
        self._closing = threading.Event()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, transfer: Transfer, held: ExitStack) -> None:
        """Close `held` as soon as the transfer is over, in a thread of ours."""
        with self._lock:
            self._held[transfer] = held
            logger.warning("a read from %s was given up and is not over", transfer.remote.name)
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="kv-ucx-orphans", daemon=True)
                self._watcher.start()

    def stop(self) -> None:
        """End the thread, whatever is left."""
        self._closing.set()
        watcher = self._watcher
        if watcher is not None:
            watcher.join()

    def release(self) -> None:
        """Close all that is still held, the agent being closed."""
        for transfer in list(self._held):
            self._close(transfer)

    def _watch(self) -> None:
        while not self._closing.wait(_LOOK_S):
            for transfer in list(self._held):
                if self._is_over(transfer):
                    self._close(transfer)
            with self._lock:
                if not self._held:
                    self._watcher = None
                    return

    def _is_over(self, transfer: Transfer) -> bool:
        try:
            return self._agent.poll(transfer)
        except OSError as error:
            logger.info("a read that was given up failed: %s", error)
            return transfer.is_over

    def _close(self, transfer: Transfer) -> None:
        """All of it, even if a part fails: the others' blocks wait for this thread too."""
        try:
            self._held.pop(transfer).close()
        except Exception:
            logger.exception("what a given-up read from %s held was not released", transfer.remote.name)
