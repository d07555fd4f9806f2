"""The processes that a worker with tensor parallelism consists of beside its own."""

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
    """The other ranks of a worker, if it has any. This process must have one thread and become the worker.
    Each of them first calls `on_fork` with its name.
    """
    size = launch.config.num_ranks(launch.role)
    return Leader(size, partial(_be_rank, launch, on_fork)) if size > 1 else None


def _be_rank(launch: Launch, on_fork: Callable[[str], None], ranks: Ranks, link: socket.socket) -> None:
    """Signals that are for the whole server are for the worker to judge; its end is this process' end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name = f"{launch.worker_id}/{ranks.rank}"
    on_fork(name)
    set_up_worker_logging(launch.config, name)
    set_up_threads(launch.config)
    build_kernels()
    follow(launch.config, ranks, link)


def end_process() -> None:
    """A lost rank is a lost worker: its supervisor starts all of it anew, and requests go on elsewhere."""
    log.error("the worker ends with it")
    os._exit(1)
