"""Pushed blocks arrive over each transport, and events report it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvtransfer.interface import Completed, Progress, Sent
from tests.kvtransfer.transfer_sides import ReceiverEnd, SenderEnd, block, is_over, make_pool, moved
from tests.tiers.seeds import seeds

Closing = Callable[[Any], Any]


def random_extents(rng: random.Random, num_sources: int, num_targets: int) -> list[tuple[int, int]]:
    """Return runs of adjacent blocks and single ones, mixed."""
    targets = list(range(num_targets))
    extents = []
    while targets and (not extents or rng.random() < 0.95):
        start = rng.randrange(len(targets))
        source = rng.randrange(num_sources)
        for target in targets[start : start + rng.randrange(1, 9)]:
            extents.append((source % num_sources, target))
            source += 1
            targets.remove(target)
    return extents


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("block_bytes", [48, 4096, 100_000])
def test_every_pushed_block_arrives_and_no_other_changes(
    closing: Closing, transport: str, seed: int, block_bytes: int
) -> None:
    rng = random.Random(seed)
    sender = closing(SenderEnd([transport], make_pool(97, block_bytes, seed=1)))
    receiver = closing(ReceiverEnd([transport], make_pool(130, block_bytes, seed=2)))
    extents = random_extents(rng, 97, 130)
    before = [block(receiver.pool, index) for index in range(130)]
    receiver.open("lease", [target for _, target in extents])

    sources, position = [source for source, _ in extents], 0
    while position < len(sources):
        step = rng.randrange(1, 40)
        some = sources[position : position + step]
        sender.push(receiver.peer, "lease", some, position, final=position + step >= len(sources))
        position += step
    completed = sender.wait_lease("lease")
    progress = receiver.wait_lease("lease")

    assert isinstance(completed, Completed)
    assert completed.nbytes == len(extents) * block_bytes
    assert progress == Progress("lease", len(extents), complete=True)
    expected = dict(enumerate(before)) | {target: block(sender.pool, source) for source, target in extents}
    assert all(block(receiver.pool, index) == content for index, content in expected.items())
    received = moved(receiver.receiver._core.pairs, transport, "kv_receive_bytes_total")
    assert moved(sender.sender.pairs, transport) == received == len(extents) * block_bytes
    assert sender.sender.transports() == {"decode-0": transport}


def test_pieces_larger_than_one_message(closing: Closing, transport: str) -> None:
    num_blocks = 9000
    sender = closing(SenderEnd([transport], make_pool(num_blocks, 4096, seed=1)))
    receiver = closing(ReceiverEnd([transport], make_pool(num_blocks, 4096, seed=2)))
    targets = random.Random(3).sample(range(num_blocks), num_blocks)
    receiver.open("lease", targets)
    sender.push(receiver.peer, "lease", range(num_blocks))
    events = sender.wait_for()
    sent = [event.blocks for event in events if isinstance(event, Sent)]
    assert sent == sorted(sent) and sent[-1] == num_blocks and len(sent) > 2
    assert all(
        block(receiver.pool, target) == block(sender.pool, source) for source, target in enumerate(targets)
    )


def test_a_fully_cached_prompt_needs_only_an_empty_final_push(closing: Closing, transport: str) -> None:
    sender, receiver = closing(SenderEnd([transport])), closing(ReceiverEnd([transport]))
    receiver.open("lease", [])
    sender.push(receiver.peer, "lease", [])
    assert sender.wait_lease("lease").nbytes == 0
    assert receiver.wait_lease("lease") == Progress("lease", 0, complete=True)


def test_completed_comes_last_and_progress_counts_distinct_blocks(closing: Closing, transport: str) -> None:
    sender, receiver = closing(SenderEnd([transport])), closing(ReceiverEnd([transport]))
    receiver.open("lease", [1, 2, 3])
    sender.push(receiver.peer, "lease", [5, 6], final=False)
    sender.push(receiver.peer, "lease", [7], 1, final=False)
    sender.push(receiver.peer, "lease", [8], 2)
    events = sender.wait_for()
    assert [event.blocks for event in events[:-1]] == [2, 3, 4]
    assert isinstance(events[-1], Completed) and events[-1].seconds > 0
    assert [event.blocks_received for event in receiver.wait_for()] == [2, 2, 3]
    assert block(receiver.pool, 2) == block(sender.pool, 7)


def test_two_senders_to_one_receiver(closing: Closing, transport: str) -> None:
    senders = [
        closing(SenderEnd([transport], make_pool(64, 4096, seed=seed), worker_id=f"prefill-{seed}"))
        for seed in (1, 2)
    ]
    receiver = closing(ReceiverEnd([transport], make_pool(128, 4096, seed=3)))
    for number, sender in enumerate(senders):
        targets = range(number * 64, number * 64 + 64)
        receiver.open(f"lease-{number}", targets)
        sender.push(receiver.peer, f"lease-{number}", range(64))
    for number, sender in enumerate(senders):
        assert isinstance(sender.wait_lease(f"lease-{number}"), Completed)
        for source in range(64):
            assert block(receiver.pool, number * 64 + source) == block(sender.pool, source)


def test_a_huge_lease_does_not_starve_a_small_one(closing: Closing, transport: str) -> None:
    num_blocks = 192
    sender = closing(SenderEnd([transport], make_pool(num_blocks, 1024 * 1024)))
    receiver = closing(ReceiverEnd([transport], make_pool(num_blocks, 1024 * 1024)))
    huge = range(num_blocks - 1)
    receiver.open("huge", huge)
    receiver.open("small", [num_blocks - 1])
    sender.push(receiver.peer, "huge", huge)
    sender.push(receiver.peer, "small", [0])
    events = sender.wait_for(lambda event: is_over(event) and event.lease_id == "huge")
    order = [event.lease_id for event in events if is_over(event)]
    assert order == ["small", "huge"]


def test_bad_arguments_are_refused_by_name(closing: Closing) -> None:
    sender, receiver = closing(SenderEnd(["shm"])), closing(ReceiverEnd(["shm"]))
    for blocks, first in (([64], 0), ([-1], 0), ([0], -1), ([0], 2**31)):
        with pytest.raises(ValueError, match=r"source blocks|positions"):
            sender.push(receiver.peer, "lease", blocks, first)
    for block_ids in ([64], [-1]):
        with pytest.raises(ValueError, match="blocks of lease"):
            receiver.open("lease", block_ids)
    receiver.open("lease", [1, 2])
    with pytest.raises(ValueError, match="open already"):
        receiver.open("lease", [3])
    with pytest.raises(ValueError, match="another open lease"):
        receiver.open("other", [2, 3])
    with pytest.raises(ValueError, match="given twice"):
        receiver.open("other", [3, 3])
    with pytest.raises(ValueError, match="num_tokens"):
        receiver.open("other", [3, 4], num_tokens=3)
    with pytest.raises(ValueError, match="carrier-pigeon"):
        SenderEnd(["carrier-pigeon"])
    with pytest.raises(ValueError, match="32 bytes"):
        SenderEnd(["tcp"], key=b"short")
