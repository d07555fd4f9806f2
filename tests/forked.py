"""Runs in the fork server: imports and tries out libraries, so that forked processes start at once."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import threading
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from engine.engine import Engine
from kvtransfer.transports.ucx_agent import preload_nixl
from protocol.config import ServeConfig
from protocol.roles import ROLES
from tests.worker.harness import tiny_config
from tests.worker.tiny_model import write_tiny_llama
from worker.setup import build_kernels, set_up_worker_logging

_IMPORTED = (
    "bench.transfer.sides",
    "speculation.head_drafter",
    "speculation.medusa",
    "tests.faults.sides",
    "tests.kvtransfer.transfer_sides",
    "tests.worker.child",
)

HUGE, MADV_COLLAPSE = 2**21, 25  # Linux has it since 6.1; an older one refuses

for module in (*_IMPORTED, *(role.loop.partition(":")[0] for role in ROLES.values())):
    importlib.import_module(module)
preload_nixl()


def try_out() -> None:
    """Do what every process does once. Transformers' thousand regular expressions take a third of a worker's
    start.
    """
    torch.set_num_threads(1)  # a fork does not inherit further threads
    with TemporaryDirectory() as folder:
        config = msgspec.convert(msgspec.to_builtins(tiny_config(Path(folder))), ServeConfig)
        set_up_worker_logging(config, "fork server")
        write_tiny_llama(Path(folder))
        build_kernels()
        Engine(config).close()
    assert threading.active_count() == 1, "a fork takes one thread along"


def run(process: Any) -> None:
    """Run a process and return its output to the test that started it."""
    for output in (1, 2):
        with contextlib.suppress(OSError):
            captured = os.open(f"/proc/{process._parent_pid}/fd/{output}", os.O_WRONLY | os.O_APPEND)
            os.dup2(captured, output)
            os.close(captured)
    BaseProcess.run(process)


def collapse() -> None:
    """Move memory to huge pages, since a fork copies the page table: 40 ms for small pages."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        if access == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
            if start < end:
                madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


ForkServerProcess.run = run
try_out()
gc.collect()
gc.freeze()  # or each forked process would copy it all at its first garbage collection
collapse()
