"""The ucx transport between two processes, also when peers are killed, frozen, restarted or disconnect."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench.transfer.process import ProcessEndedError
from kvtransfer.interface import TransferError
from kvtransfer.transports import ucx_agent
from tests.faults.leftovers import shared_segments, wait_no_orphans
from tests.kvtransfer.ucx_processes import WAIT_S, Process, Receiver, Sender, join
from tests.kvtransfer.ucx_tls import on_this_host
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")

Closing = Callable[[Any], Any]
NUM_BLOCKS = 64
EVERYTHING = [(0, 0, NUM_BLOCKS)]
NOTHING_LEFT: dict[str, int] = {}


@pytest.fixture(params=["tcp", "all"])
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


def test_it_listens_on_the_given_ports_and_leaves_logging_alone(tmp_path: Path) -> None:
    """Loopback is exempt from the ports, where UCX has a further one."""
    code = """if True:
        import logging, psutil, sys
        logging.getLogger().addHandler(logging.FileHandler(sys.argv[1], mode="w"))
        logging.warning("before")
        from kvtransfer.transports.ucx_agent import Agent
        agent = Agent("ports-1", ports=range(20_000, 30_000))
        logging.warning("after")
        print(*(each.laddr.port for each in psutil.Process().net_connections("inet")))
        agent.close()
    """
    log = tmp_path / "log"
    command = [sys.executable, "-c", code, str(log)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert log.read_text().split() == ["before", "after"]
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


def test_shared_memory_alone_is_refused() -> None:
    chosen = on_this_host("sm")
    with pytest.raises(
        RuntimeError, match=rf"UCX_TLS={chosen} .* needs tcp or RDMA .* cuda on a host with a GPU"
    ):
        Process(Sender, "sm")


def test_without_an_open_gate_or_beyond_the_senders_blocks_nothing_is_read(closing: Closing) -> None:
    sender, receiver = pair(closing, "tcp")
    with pytest.raises(OSError, match="cannot prepare"):
        join(sender, receiver, NUM_BLOCKS + 1)
    join(sender, receiver)
    before = receiver.ask("digest")
    with pytest.raises(OSError, match="cannot read from Sender"):
        receiver.ask("read", [(NUM_BLOCKS, 0, 1)])
    receiver.ask("close_reader")
    join(sender, receiver)
    assert receiver.ask("read", EVERYTHING, False) is False
    assert receiver.ask("digest") == before
    assert receiver.ask("read", EVERYTHING) is True
    assert receiver.ask("close_gate") is True
    assert receiver.ask("read", EVERYTHING) is False


def test_one_sender_on_two_connections(closing: Closing) -> None:
    """Connections share NIXL's data about the sender; closing the transport closes the last one."""
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
    assert receiver.ask("left_after_close") == NOTHING_LEFT
    with pytest.raises(OSError, match="closed"):
        receiver.ask("read", EVERYTHING)
    receiver.ask("close_reader")


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


BIG = 512 * 1024
BOUNDED_S = 10.0
"""Long enough for a busy machine, and far below `WAIT_S`, the wait for a frozen peer."""


def side(closing: Closing, kind: type, tls: str, seed: int) -> Process:
    return closing(Process(kind, tls, num_blocks=NUM_BLOCKS, block_bytes=BIG, seed=seed))


def begin_and_wait_until_moving(receiver: Process) -> None:
    """Read again and again. Return once something has arrived."""
    before = receiver.ask("first_bytes")
    receiver.ask("begin", EVERYTHING, True)
    wait_until(lambda: receiver.ask("first_bytes") != before)


def wait_until_over(receiver: Process) -> None:
    wait_until(lambda: not receiver.ask("num_orphaned_reads"), WAIT_S, "the read's end")


def read_from_frozen(closing: Closing, read_s: float) -> tuple[Process, Process]:
    """Return a stopped sender, and a receiver whose read from it has timed out."""
    sender, receiver = side(closing, Sender, "tcp", 1), side(closing, Receiver, "tcp", 2)
    join(sender, receiver, NUM_BLOCKS, read_s)
    sender.signal(signal.SIGSTOP)
    receiver.ask("begin", EVERYTHING)
    outcome, seconds = receiver.ask("end")
    assert isinstance(outcome, TimeoutError) and "no progress" in str(outcome)
    assert read_s - 0.1 < seconds < BOUNDED_S
    assert receiver.ask("num_orphaned_reads") == 1
    assert receiver.ask("close_gate") is False
    return sender, receiver


@pytest.mark.parametrize(("tls", "deaths"), [("tcp", 1), ("cma,tcp", 2)])
def test_a_killed_senders_successor_works(closing: Closing, tls: str, deaths: int) -> None:
    """NIXL forgets a dead peer, so its prepared lists dangle; other systems' decode workers crash here."""
    receiver = side(closing, Receiver, tls, 2)
    for seed in range(3, 3 + deaths):
        sender = side(closing, Sender, tls, seed)
        join(sender, receiver, NUM_BLOCKS, 10)
        begin_and_wait_until_moving(receiver)
        sender.signal(signal.SIGKILL)
        killed = time.monotonic()
        outcome, _ = receiver.ask("end")
        assert isinstance(outcome, OSError), outcome
        assert time.monotonic() - killed < 12
        with pytest.raises(OSError):
            receiver.ask("read", EVERYTHING)
        wait_until_over(receiver)
        receiver.ask("close_reader")
        sender.close()
    sender = side(closing, Sender, tls, 6)
    join(sender, receiver, NUM_BLOCKS)
    assert receiver.ask("read", EVERYTHING) is True
    assert receiver.ask("digest") == sender.ask("digest")


def test_a_frozen_sender_times_out_and_its_blocks_stay_guarded(closing: Closing) -> None:
    """Over tcp the sender's process has to answer. Over cma the kernel copies, even from a frozen process."""
    sender, receiver = read_from_frozen(closing, 0.5)
    with pytest.raises(ConnectionResetError, match="earlier reads"):  # NIXL would count them as failed
        receiver.ask("connect_after_a_loss")
    receiver.ask("close_reader")
    assert receiver.ask("gate_emptied", 0.3) is False
    before = receiver.ask("digest")

    sender.signal(signal.SIGCONT)
    assert receiver.ask("gate_emptied", WAIT_S) is True
    assert receiver.ask("num_orphaned_reads") == 0
    blocks = receiver.ask("block_digests")
    assert receiver.ask("digest") != before, "nothing landed: the guard guarded nothing"
    receiver.ask("reopen_gate")
    join(sender, receiver, NUM_BLOCKS)
    assert receiver.ask("read", [(0, 0, 1)]) is True  # the sender has answered all earlier requests
    late = receiver.ask("block_digests")
    assert late[1:] == blocks[1:], "something landed after the gate was left"
    receiver.ask("close_reader")
    assert receiver.ask("left_after_close") == NOTHING_LEFT


def test_a_sender_that_is_killed_while_frozen_frees_the_blocks(closing: Closing) -> None:
    sender, receiver = read_from_frozen(closing, 0.3)
    sender.kill()
    assert receiver.ask("gate_emptied", WAIT_S) is True
    assert receiver.ask("num_orphaned_reads") == 0


def test_close_does_not_wait_for_a_frozen_sender(closing: Closing) -> None:
    shared = shared_segments()
    sender, receiver = read_from_frozen(closing, 0.3)
    began = time.monotonic()
    assert receiver.ask("left_after_close") == NOTHING_LEFT
    assert time.monotonic() - began < BOUNDED_S
    assert receiver.ask("gate_emptied", 0) is True
    before = receiver.ask("digest")
    sender.signal(signal.SIGCONT)
    with suppress(OSError, ProcessEndedError):  # with plain TCP, UCX may end a sender whose reader is gone
        sender.ask("digest")
    assert receiver.ask("digest") == before
    wait_no_orphans(shared)


@pytest.mark.parametrize("thaws", [True, False])
def test_joining_a_frozen_sender_fails_in_bounded_time(closing: Closing, thaws: bool) -> None:
    sender, receiver = side(closing, Sender, "tcp", 1), side(closing, Receiver, "tcp", 2)
    sender.tell("connect", receiver.ask("listen"))
    receiver.ask("accept")
    sender.signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        receiver.ask("set_up", NUM_BLOCKS, 0.3)
    assert time.monotonic() - began < BOUNDED_S
    assert receiver.ask("num_orphaned_reads") == 1
    if thaws:
        sender.signal(signal.SIGCONT)
        wait_until_over(receiver)
    assert receiver.ask("left_after_close") == NOTHING_LEFT
    assert receiver.ask("num_orphaned_reads") == 0


def test_a_sender_that_disconnects_ends_the_read(closing: Closing) -> None:
    """It may reuse its blocks from then on, so the data read is not used."""
    sender, receiver = side(closing, Sender, "tcp", 1), side(closing, Receiver, "tcp", 2)
    join(sender, receiver, NUM_BLOCKS)
    receiver.ask("begin", EVERYTHING, True)
    sender.ask("hang_up")
    outcome, _ = receiver.ask("end")
    assert isinstance(outcome, ConnectionResetError)
    wait_until_over(receiver)
    receiver.ask("close_reader")
    join(sender, receiver, NUM_BLOCKS)
    assert receiver.ask("read", EVERYTHING) is True
    assert receiver.ask("digest") == sender.ask("digest")


def test_a_closing_receiver_does_not_wait_for_a_frozen_sender(closing: Closing) -> None:
    sender, receiver = side(closing, Sender, "tcp", 1), side(closing, Receiver, "tcp", 2)
    join(sender, receiver, NUM_BLOCKS)
    sender.signal(signal.SIGSTOP)
    receiver.ask("begin", EVERYTHING)
    began = time.monotonic()
    receiver.ask("stop")
    outcome, _ = receiver.ask("end")
    assert type(outcome).__name__ == "StoppedError"
    assert time.monotonic() - began < BOUNDED_S
    assert receiver.ask("num_orphaned_reads") == 1
