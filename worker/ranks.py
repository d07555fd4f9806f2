"""The other processes (ranks) of a worker with tensor parallelism."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import partial

from engine.parallel.follower import follow
from engine.parallel.group import Ranks
from engine.parallel.leader import Leader
from worker.launch import Launch
from worker.setup import build_kernels, set_up_threads, set_up_worker_logging

log = logging.getLogger(__name__)


def fork_ranks(launch: Launch, on_fork: Callable[[str], None] = lambda name: None) -> Leader | None:
    """Fork a worker's other ranks, if it has any. This process must have one thread and become the worker.
    Each rank first calls `on_fork` with its name.
    """
    size = launch.config.num_ranks(launch.role)
    return Leader(size, partial(_be_rank, launch, on_fork)) if size > 1 else None


def _be_rank(launch: Launch, on_fork: Callable[[str], None], ranks: Ranks, link: socket.socket) -> None:
    """Run one rank. It ignores signals for the whole server, because the worker handles them and ends its
    ranks.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name = f"{launch.worker_id}/{ranks.rank}"
    on_fork(name)
    set_up_worker_logging(launch.config, name)
    set_up_threads(launch.config)
    build_kernels()
    follow(launch.config, ranks, link)


def end_process() -> None:
    """End this worker, which cannot serve without a lost rank. The supervisor starts it again, and requests
    continue elsewhere.
    """
    log.error("the worker ends with it")
    os._exit(1)
