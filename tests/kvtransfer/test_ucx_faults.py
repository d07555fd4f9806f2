"""`ucx` peers that are killed, frozen, restarted or disconnect: reads end, blocks stay guarded."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from tests.faults.leftovers import shared_segments, wait_no_orphans
from tests.kvtransfer.ucx_processes import WAIT_S, Process, Receiver, Sender, join
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")

Closing = Callable[[Any], Any]
NUM_BLOCKS = 64
BIG = 512 * 1024
BOUNDED_S = 10.0
"""Long enough for a busy machine, and far below `WAIT_S`, the wait for a frozen peer."""
EVERYTHING = [(0, 0, NUM_BLOCKS)]
NOTHING_LEFT: dict[str, list[str]] = {"threads": [], "descriptors": [], "shared memory": []}


@pytest.fixture(params=["tcp", "cma,tcp", "all"])
def tls(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["cma,tcp", "all"])
def one_sided(request: pytest.FixtureRequest) -> str:
    """Select transports with one-sided reads: with plain TCP, UCX ends a sender whose reader dies."""
    return str(request.param)


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


def test_a_killed_senders_successor_works(closing: Closing, tls: str) -> None:
    """NIXL forgets a dead peer, so its prepared lists dangle; other systems' decode workers crash here."""
    receiver = side(closing, Receiver, tls, 2)
    for seed in (3, 4):
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
    assert receiver.is_alive()


def test_a_killed_receivers_successor_works(closing: Closing, one_sided: str) -> None:
    sender = side(closing, Sender, one_sided, 1)
    for seed in (2, 3):
        receiver = side(closing, Receiver, one_sided, seed)
        join(sender, receiver, NUM_BLOCKS)
        begin_and_wait_until_moving(receiver)
        receiver.signal(signal.SIGKILL)
        receiver.close()
    receiver = side(closing, Receiver, one_sided, 4)
    join(sender, receiver, NUM_BLOCKS)
    assert receiver.ask("read", EVERYTHING) is True
    assert receiver.ask("digest") == sender.ask("digest")
    assert sender.ask("left_after_close") == NOTHING_LEFT


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
    with suppress(OSError, EOFError):  # with plain TCP, UCX may end a sender whose reader is gone
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


def test_a_frozen_receiver_blocks_nobody(closing: Closing, one_sided: str) -> None:
    """One sender has two receivers, one of them frozen during a read."""
    sender = side(closing, Sender, one_sided, 1)
    frozen, other = side(closing, Receiver, one_sided, 2), side(closing, Receiver, one_sided, 3)
    join(sender, frozen, NUM_BLOCKS)
    begin_and_wait_until_moving(frozen)
    frozen.signal(signal.SIGSTOP)
    join(sender, other, NUM_BLOCKS)
    assert other.ask("read", EVERYTHING) is True
    assert other.ask("digest") == sender.ask("digest")
    frozen.kill()
    assert other.ask("read", EVERYTHING) is True
    assert sender.ask("left_after_close") == NOTHING_LEFT
