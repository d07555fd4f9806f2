"""Waits for reads that were given up but may still write to our blocks."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack

from kvtransfer.transports.ucx.agent import Agent, Transfer

logger = logging.getLogger("tandem.kvtransfer")

_LOOK_S = 0.02


class OrphanedReads:
    """Polls each such read, in a thread of its own, until it is over, then releases its resources.

    Each read ends at some time: UCX gives up a dead peer, and a frozen peer continues or dies.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._held: dict[Transfer, tuple[ExitStack, threading.Thread]] = {}
        self._closing = threading.Event()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, transfer: Transfer, held: ExitStack) -> None:
        """Close `held` as soon as the transfer is over."""
        logger.warning("a read from %s was given up and is not over", transfer.remote.name)
        watcher = threading.Thread(target=self._watch, args=(transfer,), name="kv-ucx-orphan", daemon=True)
        self._held[transfer] = held, watcher
        watcher.start()

    def stop(self) -> None:
        """End the threads, even if reads are left."""
        self._closing.set()
        for _, watcher in list(self._held.values()):
            watcher.join()

    def release(self) -> None:
        """Close everything that is still held, after the agent was closed."""
        for transfer in list(self._held):
            self._close(transfer)

    def _watch(self, transfer: Transfer) -> None:
        while not self._closing.wait(_LOOK_S):
            try:
                over = self._agent.poll(transfer)
            except OSError as error:
                logger.info("a read that was given up failed: %s", error)
                over = transfer.is_over
            if over:
                self._close(transfer)
                return

    def _close(self, transfer: Transfer) -> None:
        held, _ = self._held.pop(transfer)
        try:
            held.close()
        except Exception:
            logger.exception("what a given-up read from %s held was not released", transfer.remote.name)
