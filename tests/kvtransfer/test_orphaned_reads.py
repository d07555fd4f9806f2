"""Abandoned reads: each is polled until it ends, whatever fails in another."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

from kvtransfer.transports.ucx_agent import Remote, Transfer
from kvtransfer.transports.ucx_reader import OrphanedReads
from tests.waiting import wait_until


def read() -> Transfer:
    return Transfer(0, Remote("sender", b""))


def raising(error: Exception) -> Any:
    def call(*arguments: object) -> Any:
        raise error

    return call


def test_errors_of_one_read_do_not_affect_others() -> None:
    over: set[Transfer] = set()
    failing, unreleasable, good = read(), read(), read()

    def poll(transfer: Transfer) -> bool:
        if transfer is failing and transfer in over:
            transfer.is_over = True
            raise OSError("NIXL: no such peer")
        return transfer in over

    orphans = OrphanedReads(SimpleNamespace(poll=poll))  # type: ignore[arg-type]
    released: list[str] = []
    for transfer, name in ((failing, "failing"), (unreleasable, "unreleasable"), (good, "good")):
        held = ExitStack()
        held.callback(released.append, name)
        if transfer is unreleasable:
            held.callback(raising(OSError("NIXL: cannot release a list of blocks")))
        orphans.add(transfer, held)
    over.add(unreleasable)
    wait_until(lambda: released == ["unreleasable"])
    over |= {failing, good}
    wait_until(lambda: sorted(released) == ["failing", "good", "unreleasable"])
    wait_until(lambda: not any(thread.name == "kv-ucx-orphan" for thread in threading.enumerate()))
    orphans.add(good, ExitStack())
    wait_until(lambda: not len(orphans))
    orphans.stop()
