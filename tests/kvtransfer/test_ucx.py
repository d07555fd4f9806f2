"""The `ucx` transport between two processes, over the UCX transports of any Linux host."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.interface import TransferError
from kvtransfer.transports import ucx_agent
from tests.faults.leftovers import shared_segments, wait_no_orphans
from tests.kvtransfer.ucx_processes import Process, Receiver, Sender, join
from tests.kvtransfer.ucx_tls import on_this_host

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")

Closing = Callable[[Any], Any]
NUM_BLOCKS = 64
EVERYTHING = [(0, 0, NUM_BLOCKS)]
NOTHING_LEFT: dict[str, list[str]] = {"threads": [], "descriptors": [], "shared memory": []}


@pytest.fixture(params=["tcp", "cma,tcp", "all"])
def tls(request: pytest.FixtureRequest) -> str:
    """Select UCX's transport for tests of what UCX does differently. Tests of our own code use only one."""
    return str(request.param)


def pair(closing: Closing, tls: str, **options: Any) -> tuple[Process, Process]:
    sender = closing(Process(Sender, tls, seed=1, **options))
    receiver = closing(Process(Receiver, tls, seed=2, **options))
    return sender, receiver


def test_blocks_arrive_in_the_wanted_places(closing: Closing, tls: str) -> None:
    """Setting up a connection writes nothing else into the pool."""
    sender, receiver = pair(closing, tls)
    theirs, ours = sender.ask("block_digests"), receiver.ask("block_digests")
    join(sender, receiver)
    assert receiver.ask("block_digests") == ours
    runs = [(3, 40, 2), (5, 42, 4), (60, 0, 4), (0, 20, 1), (9, 19, 1), (7, 63, 1)]
    assert receiver.ask("read", runs) is True
    for source, target, count in runs:
        ours[target : target + count] = theirs[source : source + count]
    assert receiver.ask("read", []) is True
    assert receiver.ask("block_digests") == ours
    assert sender.ask("block_digests") == theirs


def test_it_listens_on_the_given_ports() -> None:
    """Loopback is exempt, where UCX has a further port."""
    code = (
        "import psutil; from kvtransfer.transports.ucx_agent import Agent; "
        "agent = Agent('ports-1', ports=range(20_000, 30_000)); "
        "print(*(each.laddr.port for each in psutil.Process().net_connections('inet'))); agent.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listening = list(map(int, done.stdout.split()))
    assert sum(20_000 <= port < 30_000 for port in listening) >= len(listening) - 1 > 0


def test_a_large_pool_in_small_blocks(closing: Closing) -> None:
    options = {"num_blocks": 4096, "block_bytes": 16 * 1024}
    sender, receiver = pair(closing, "all", **options)
    join(sender, receiver, 4096)
    scattered = [(index * 1021 % 4096, index, 1) for index in range(4096)]
    assert receiver.ask("read", scattered) is True
    theirs = sender.ask("block_digests")
    assert receiver.ask("block_digests") == [theirs[source] for source, _, _ in scattered]


def test_the_first_read_costs_no_more_than_later_ones(closing: Closing) -> None:
    """UCX connects at the first read, in tens of milliseconds; on a busy machine later ones may, too."""
    assert any(first_read_s(closing) < 0.02 for _ in range(4))


def first_read_s(closing: Closing) -> float:
    sender, receiver = pair(closing, "tcp")
    join(sender, receiver)
    receiver.ask("begin", [(0, 0, 1)])
    return float(receiver.ask("end")[1])


def test_plain_tcp_is_refused_unless_asked_for(closing: Closing) -> None:
    """Over plain TCP the sender's process answers reads, and UCX ends it when a reader dies meanwhile."""
    sender = closing(Process(Sender, "tcp", emulate=False))
    receiver = closing(Process(Receiver, "tcp", emulate=False))
    sender.tell("connect", receiver.ask("listen"))
    receiver.ask("accept")
    with pytest.raises(ConnectionResetError):
        receiver.ask("set_up", NUM_BLOCKS, 10)
    with pytest.raises(OSError, match=r"UCX cannot read .* by RDMA, cuda_ipc or cma"):
        sender.answer()
    assert receiver.ask("left_after_close") == sender.ask("left_after_close") == NOTHING_LEFT


def test_shared_memory_alone_is_refused(closing: Closing) -> None:
    chosen = on_this_host("sm")
    with pytest.raises(OSError, match=rf"UCX_TLS={chosen} .* needs tcp or RDMA .* cuda on a host with a GPU"):
        Process(Sender, "sm")


def test_without_an_open_gate_nothing_is_read(closing: Closing) -> None:
    sender, receiver = pair(closing, "tcp")
    join(sender, receiver)
    before = receiver.ask("digest")
    assert receiver.ask("read", EVERYTHING, False) is False
    assert receiver.ask("close_gate") is True
    assert receiver.ask("read", EVERYTHING) is False
    assert receiver.ask("digest") == before


def test_blocks_beyond_the_senders_are_an_error(closing: Closing) -> None:
    sender, receiver = pair(closing, "tcp")
    join(sender, receiver)
    before = receiver.ask("digest")
    with pytest.raises(OSError, match="cannot read from Sender"):
        receiver.ask("read", [(NUM_BLOCKS, 0, 1)])
    assert receiver.ask("digest") == before


def test_a_pool_larger_than_the_senders_is_refused(closing: Closing) -> None:
    sender, receiver = pair(closing, "tcp")
    with pytest.raises(OSError, match="cannot prepare"):
        join(sender, receiver, NUM_BLOCKS + 1)
    join(sender, receiver)
    assert receiver.ask("read", EVERYTHING) is True


def test_one_sender_on_two_connections(closing: Closing) -> None:
    """The second connection shares NIXL's data about the sender, and still works when the first is closed."""
    sender, receiver = pair(closing, "cma,tcp")
    join(sender, receiver)
    receiver.ask("keep_reader")
    join(sender, receiver)
    receiver.ask("close_kept_reader")
    assert receiver.ask("read", EVERYTHING) is True
    assert receiver.ask("digest") == sender.ask("digest")
    receiver.ask("close_reader")
    join(sender, receiver)
    assert receiver.ask("read", EVERYTHING) is True


def test_both_directions_at_once(closing: Closing) -> None:
    first, second = pair(closing, "tcp")
    join(first, second)
    back = closing(Process(Receiver, "tcp", seed=3))
    join(second, back)
    assert second.ask("read", EVERYTHING) is True
    assert back.ask("read", EVERYTHING) is True
    assert back.ask("digest") == first.ask("digest")


def test_close_leaves_nothing_and_a_transport_reopens(closing: Closing, tls: str) -> None:
    shared = shared_segments()
    sender, receiver = pair(closing, tls)
    for _ in range(2):
        join(sender, receiver)
        assert receiver.ask("read", EVERYTHING) is True
        receiver.ask("close_reader")
        assert receiver.ask("left_after_close") == NOTHING_LEFT
        receiver.ask("open")
    assert receiver.ask("left_after_close") == NOTHING_LEFT
    assert sender.ask("left_after_close") == NOTHING_LEFT
    wait_no_orphans(shared)


def test_close_with_a_reader_that_is_still_open(closing: Closing) -> None:
    sender, receiver = pair(closing, "cma,tcp")
    join(sender, receiver)
    assert receiver.ask("left_after_close") == NOTHING_LEFT
    with pytest.raises(OSError, match="closed"):
        receiver.ask("read", EVERYTHING)
    receiver.ask("close_reader")


def test_an_idle_pair_costs_nothing(closing: Closing, tls: str) -> None:
    """Measured soon after the last read, whose remaining work may take a moment."""
    sides = sender, receiver = pair(closing, tls)
    join(sender, receiver)
    assert receiver.ask("read", EVERYTHING) is True
    assert any(cpu_share_while_idle(sides) < 0.005 for _ in range(20))


def cpu_share_while_idle(sides: tuple[Process, Process]) -> float:
    """Return the larger share of a core that one of them uses."""
    before, seconds = [side.ask("cpu_seconds") for side in sides], 0.25
    time.sleep(seconds)
    return max(side.ask("cpu_seconds") - start for side, start in zip(sides, before, strict=True)) / seconds


def test_garbled_metadata_is_an_error(closing: Closing) -> None:
    receiver = closing(Process(Receiver, "tcp"))
    good = receiver.ask("metadata_of_another_agent")
    for bad in (b"\0", b"nixl" * 100, good[: len(good) // 2], good[:-20], good[20:]):
        with pytest.raises(OSError, match="metadata"):
            receiver.ask("connect_agent", "somebody", bad)
    with pytest.raises(Exception, match="metadata of somebody is that of other"):
        receiver.ask("connect_agent", "somebody", good)


def test_a_host_without_nixl_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_agent, "_PACKAGES", ("nixl_of_no_kind",))
    with pytest.raises(TransferError, match="pip install --no-deps nixl"):
        ucx_agent.bindings.__wrapped__()


def test_loading_nixl_leaves_logging_alone(tmp_path: Path) -> None:
    code = """if True:
        import logging, sys
        from kvtransfer.transports.ucx_agent import bindings
        handler = logging.FileHandler(sys.argv[1], mode="w")
        logging.getLogger().addHandler(handler)
        logging.warning("before")
        bindings()
        logging.warning("after")
    """
    log = tmp_path / "log"
    subprocess.run([sys.executable, "-c", code, str(log)], check=True, timeout=60)
    assert log.read_text().split() == ["before", "after"]


@pytest.mark.parametrize("wire", ["sm,tcp", "tcp", "all"])
def test_sigkill_leaves_no_shared_memory(closing: Closing, wire: str) -> None:
    shared = shared_segments()
    sender, receiver = pair(closing, wire)
    join(sender, receiver)
    assert receiver.ask("read", EVERYTHING) is True
    for side in (sender, receiver):
        side.signal(signal.SIGKILL)
        side.kill()
    wait_no_orphans(shared)
