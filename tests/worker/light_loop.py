"""A worker's loop over a real engine without sockets or threads: the test delivers every message."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

import worker.loop
from engine.engine import Engine
from engine.kv.prefix_cache import find_prefix
from kvtransfer.interface import Closed, Completed, Failed, ReceiveEvent, SendEvent, TransferError
from protocol.handoff import Extent
from protocol.ids import PeerAddress, TransferOffer
from protocol.requests import EngineRequest
from protocol.roles import ROLES
from protocol.router_to_worker import Generate, RouterToWorker
from protocol.worker_to_worker import PeerReply, PeerRequest
from speculation.remote import RemoteDrafter
from speculation.speculator import BatchSpeculator
from tests.worker.harness import request, tiny_config
from worker.loop import WorkerLoop
from worker.parts import WorkerParts

OURS = "a" * 16
"""The loop's incarnation."""
STALE = "0" * 16
OFFER = TransferOffer(transport="tcp", host_id="h", address="tcp://127.0.0.1:9")
BLOCK_BYTES = 16 * 512

Loop = TypeVar("Loop", bound=WorkerLoop)


def address(worker_id: str, incarnation: str) -> PeerAddress:
    return PeerAddress(
        worker_id=worker_id, incarnation=incarnation, control="tcp://127.0.0.1:9", offers=[OFFER]
    )


def small_engine(model_folder: Path, num_blocks: int, **changes: Any) -> Engine:
    config = tiny_config(
        model_folder, max_model_len=128, kv_cache_memory_bytes=num_blocks * BLOCK_BYTES, **changes
    )
    return Engine(config, speculate=BatchSpeculator)


def forget_cached_blocks(engine: Engine) -> None:
    """Empty the prefix cache, so that earlier requests have no effect."""
    blocks = engine.blocks
    everything, _ = find_prefix(blocks, [], b"")
    everything.grow(0, blocks.available * blocks.block_size)
    everything.free()


class FakeReceiver:
    """Leases whose writers the test plays. Closed ones only yield `Closed`, as with the real receiver."""

    offers = (OFFER,)

    def __init__(self) -> None:
        self.open_leases: dict[str, list[int]] = {}
        self.written: dict[str, list[int]] = {}
        """Blocks that are being written, by lease."""
        self._events: list[ReceiveEvent] = []

    def open(
        self,
        lease_id: str,
        extents: Sequence[Extent],
        *,
        first_token: int | Sequence[int] = 0,
        num_tokens: int | None = None,
    ) -> None:
        assert lease_id not in self.open_leases
        first = first_token if isinstance(first_token, int) else first_token[0]
        self.open_leases[lease_id] = extents[0].blocks[first // 16 :]

    def close_lease(self, lease_id: str) -> bool:
        self.open_leases.pop(lease_id, None)
        return lease_id not in self.written

    def poll(self) -> list[ReceiveEvent]:
        events, self._events = self._events, []
        return [event for event in events if isinstance(event, Closed) or event.lease_id in self.open_leases]

    def tell(self, event: ReceiveEvent) -> None:
        self._events.append(event)

    def begin_write(self, lease_id: str) -> None:
        self.written[lease_id] = self.open_leases[lease_id]

    def end_write(self, lease_id: str) -> None:
        del self.written[lease_id]
        if lease_id not in self.open_leases:
            self.tell(Closed(lease_id))

    def close(self) -> None:
        pass


class FakeSender:
    """Pushes that take as long as the test likes. `unreachable` peers cannot be connected to."""

    def __init__(self) -> None:
        self.read: dict[str, list[int]] = {}
        """Blocks that may still be read, by lease."""
        self.final: set[str] = set()
        self.unreachable: set[str] = set()
        self._events: list[SendEvent] = []

    def connect(self, peer: PeerAddress) -> str:
        if peer.incarnation in self.unreachable:
            raise TransferError("no common transport")
        return "tcp"

    def wire_dtype(self, peer: PeerAddress) -> str:
        return "auto"

    def push(
        self,
        peer: PeerAddress,
        lease_id: str,
        extents: Sequence[Extent],
        first_position: int | Sequence[int],
        num_tokens: int,
        *,
        final: bool,
    ) -> None:
        assert lease_id not in self.final
        self.read.setdefault(lease_id, []).extend(extents[0].blocks)
        if final:
            self.final.add(lease_id)

    def abort(self, lease_id: str) -> None:
        self.read.pop(lease_id, None)
        self.final.discard(lease_id)
        self._events = [event for event in self._events if event.lease_id != lease_id]

    def poll(self) -> list[SendEvent]:
        events, self._events = self._events, []
        return events

    def tell(self, event: SendEvent) -> None:
        if isinstance(event, Completed | Failed):
            self.read.pop(event.lease_id, None)
            self.final.discard(event.lease_id)
        self._events.append(event)

    def close(self) -> None:
        pass


class FakeInbox:
    """Keeps the replies with their addressees. Messages in `arrived` are received next."""

    endpoint = "tcp://127.0.0.1:9"

    def __init__(self, socket: int) -> None:
        self.socket = socket
        self.replies: list[tuple[bytes, PeerReply]] = []
        self.arrived: list[tuple[bytes, PeerRequest]] = []

    def receive(self) -> list[tuple[bytes, PeerRequest]]:
        arrived, self.arrived = self.arrived, []
        return arrived

    def reply(self, identity: bytes, message: PeerReply) -> None:
        self.replies.append((identity, message))

    def close(self) -> None:
        pass


class FakePeers:
    def __init__(self) -> None:
        self.sent: list[tuple[PeerAddress, PeerRequest]] = []

    def send(self, peer: PeerAddress, message: PeerRequest) -> None:
        self.sent.append((peer, message))

    def offer(self, peer: PeerAddress, message: PeerRequest) -> bool:
        self.sent.append((peer, message))
        return True

    def receive(self, events: dict[object, int]) -> list[Any]:
        return []

    def close_idle(self, now: float, in_use: set[str]) -> None:
        pass

    def close(self) -> None:
        pass


class FakeRouter:
    """The only router's connection. Keeps the outputs and other messages that the loop sends."""

    def __init__(self, socket: int) -> None:
        self.socket = socket
        self.sockets = [socket]
        self.outputs: list[Any] = []
        self.messages: list[msgspec.Struct] = []

    def __iter__(self) -> Iterator[FakeRouter]:
        yield self

    def __len__(self) -> int:
        return 1

    def send(self, request_id: str, message: msgspec.Struct) -> None:
        self.messages.append(message)

    def send_outputs(self, outputs: list[Any]) -> None:
        self.outputs += outputs

    def close(self) -> None:
        pass


class LightLoop:
    """A `loop` with fakes around it."""

    def __init__(
        self,
        make: Callable[..., Loop],
        engine: Engine,
        role: str,
        remote_drafts: RemoteDrafter | None = None,
        incarnation: str = OURS,
    ) -> None:
        self.engine = engine
        forget_cached_blocks(engine)
        self.receiver, self.sender, self.peers = FakeReceiver(), FakeSender(), FakePeers()
        parts = WorkerParts(
            config=engine.config,
            role=ROLES[role],
            worker_id=f"{role}-0",
            incarnation=incarnation,
            remote_drafts=remote_drafts,
            host="127.0.0.1",
            keys=cast(Any, None),
            context=cast(Any, None),
        )
        self._parts, self._fds = parts, [os.eventfd(0), os.eventfd(0)]
        self.router, self.inbox = FakeRouter(self._fds[0]), FakeInbox(self._fds[1])
        with (
            mock.patch.object(worker.loop, "PeerSocket", return_value=self.inbox),
            mock.patch.object(worker.loop, "PeerLinks", return_value=self.peers),
            mock.patch.object(worker.loop, "open_transfers", return_value=(self.sender, self.receiver)),
        ):
            self.loop: Any = make(parts, engine, self.router)

    def close(self) -> None:
        self._parts.wake.close()
        for descriptor in self._fds:
            os.close(descriptor)

    @property
    def table(self) -> Any:
        return self.loop.requests

    @property
    def requests(self) -> list[Any]:
        """Return all request objects that still hold an id or a lease."""
        table = self.table
        return list({id(each): each for each in [*table._by_id.values(), *table._by_lease.values()]}.values())

    def generate(
        self, request: EngineRequest, decode: PeerAddress | None = None, incarnation: str = OURS, **more: Any
    ) -> None:
        self.hear(Generate(incarnation=incarnation, request=request, decode=decode, **more))
        self.flush()

    def hear(self, message: RouterToWorker) -> None:
        self.loop.take(message, self.router)

    def deliver(self) -> None:
        """Let the loop see the transfers' events."""
        self.loop._handle_transfers()
        self.loop.handle({})
        self.flush()

    def step(self) -> None:
        if self.engine.has_work():
            self.loop._step()
        self.flush()

    def flush(self) -> None:
        if self.loop.outbox:
            self.loop.flush()

    def run(self) -> None:
        """Step until everything is computed that has room."""
        while self.engine.has_work() and self.loop._advancing:
            self.step()
        self.loop._advancing = True

    def pass_deadlines(self) -> None:
        self.loop.expire(time.monotonic() + 1000)
        self.flush()

    def num_ends(self, request_id: str) -> int:
        """Return how often the router was told that the request is over."""
        ends = [output for output in self.router.outputs if output.finish_reason is not None]
        return sum(output.request_id == request_id for output in ends)

    def finish(self, watch: Callable[[], None] = lambda: None) -> None:
        """Finish all writes, deadlines and tokens. `watch` is called after each of them."""
        for lease in list(self.receiver.written):
            self.receiver.end_write(lease)
        for _ in range(4):
            for phase in (self.deliver, self.run, self.pass_deadlines):
                phase()
                watch()
        self.close()

    def computing_blocks(self) -> set[int]:
        """Return the blocks of the engine's sequences."""
        held = [each.sequence_blocks for each in self.engine.sequences.values()]
        return {block for each in held if each is not None for block in each.blocks[0]}

    def used_blocks(self) -> set[int]:
        references = self.engine.blocks._references
        return {block for block, count in enumerate(references) if count}


def ask(request_id: str, prompt: Sequence[int], max_tokens: int = 4) -> EngineRequest:
    return request(request_id, list(prompt), max_tokens=max_tokens)


def walk(machine: type[RuleBasedStateMachine]) -> None:
    """Run the machine's rules in many orders."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
