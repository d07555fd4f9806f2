"""Runs scenarios: two processes, requests, faults, and checks of what is left afterwards."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import pytest

from protocol.ids import PeerAddress
from tests.faults.leftovers import shared_segments, wait_no_orphans
from tests.faults.points import Point, points_over
from tests.faults.processes import SMALL, Child, DiedError, Stock
from tests.faults.proxy import Damage, Proxy
from tests.faults.sides import CLOSED_EARLY, Options, Outcome

DEADLINE_S = 6.0
"""The longest that a request may take. A side that is told of a failure must end it long before."""

SERVED_S = 20.0
"""The longest that an undisturbed request may take on a busy machine."""

ORPHAN_S = 0.6
"""A lease is given up when nobody has sent anything under it for this time."""

UCX_CONNECT_S = 2.0
"""UCX's first contact takes longer than the others'."""

_ALIKE = {"connecting", "connected", "hello sent", "challenge received", "hello received", "challenge sent"}
"""Points of the handshake, before a transport sets anything up."""
_numbers = itertools.count()
needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed")


def cases(points: dict[str, Point], ucx: Sequence[str] = ()) -> list[Any]:
    """Return (point, transport): all over `tcp`, those that differ over `shm`, and some for `ucx`."""
    everywhere = [
        pytest.param(name, transport, id=f"{name}, {transport}")
        for transport in ("tcp", "shm")
        for name in points_over(points, transport)
        if transport == "tcp" or name not in _ALIKE
    ]
    return everywhere + [pytest.param(name, "ucx", id=f"{name}, ucx", marks=needs_nixl) for name in ucx]


@dataclass
class Request:
    """A lease between two processes. `outcomes` has the result by role once the request is over."""

    lease_id: str
    seed: int
    sender: Child
    receiver: Child
    count: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def sent(self) -> str:
        """The sender's outcome, or an empty string if the sender cannot tell."""
        return self.outcomes.get("sender", ("", ""))[0]

    @property
    def received(self) -> str:
        return self.outcomes.get("receiver", ("", ""))[0]

    @property
    def reasons(self) -> str:
        return "; ".join(reason for _, reason in self.outcomes.values())


class Arena:
    """The processes, proxies and requests of one scenario."""

    def __init__(self, stock: Stock, transports: tuple[str, ...] = ("tcp",)) -> None:
        self.transports = transports
        self.converting = False
        """Whether the receivers' blocks have another dtype than the senders'."""
        self.requests: list[Request] = []
        self._proxies: list[Proxy] = []
        self._gone: list[str] = []
        self._stock = stock
        self._children: list[Child] = []
        self._segments = shared_segments()

    # --- setting up -------------------------------------------------------------------------------

    def sender(self, worker_id: str = "prefill-0", **options: Any) -> Child:
        return self._open("sender", worker_id, **options)

    def receiver(self, worker_id: str = "decode-0", **options: Any) -> Child:
        return self._open("receiver", worker_id, **options)

    def _open(
        self,
        role: Literal["sender", "receiver"],
        worker_id: str,
        size: tuple[int, int] = SMALL,
        network: str = "",
        tls: str = "cma,tcp",
        **options: Any,
    ) -> Child:
        transports = options.pop("transports", self.transports)
        if self.converting:
            options |= {"layout": "bf16"} if role == "sender" else {"layout": "fp16", "their_layout": "bf16"}
        if "ucx" in transports:
            options.setdefault("connect_timeout_s", UCX_CONNECT_S)
        child = self._stock.take(size, network, tls)
        self._children.append(child)
        child.open(role, Options(worker_id, transports, **options))
        return child

    def proxy(self, receiver: Child, *damages: Damage, transport: str = "tcp") -> tuple[Proxy, PeerAddress]:
        """Put a proxy before one of the receiver's transports. Return it and the address through it."""
        offers = list(receiver.peer.offers)
        index = next(i for i, offer in enumerate(offers) if offer.transport == transport)
        proxy = Proxy(offers[index].address, list(damages))
        self._proxies.append(proxy)
        offers[index] = msgspec.structs.replace(offers[index], address=proxy.address)
        return proxy, msgspec.structs.replace(receiver.peer, offers=offers)

    def drop(self, proxy: Proxy) -> None:
        proxy.close()
        self._proxies.remove(proxy)
        self._gone.append(proxy.address)

    # --- requests ---------------------------------------------------------------------------------

    def reserve(self, sender: Child, receiver: Child, count: int = 24, lease_id: str = "") -> Request:
        """Reserve blocks for a request. A refused request has its outcome at once."""
        seed = next(_numbers)
        request = Request(lease_id or f"lease-{seed:06}", seed, sender, receiver, count)
        self.requests.append(request)
        refusal = receiver.ask("reserve", request.lease_id, request.seed, count)
        if refusal:
            request.outcomes = {"receiver": ("failed", refusal)}
        return request

    def again(self, request: Request, sender: Child) -> Request:
        """Return a request for the same lease by another sender."""
        again = Request(request.lease_id, request.seed, sender, request.receiver, request.count)
        again.outcomes = {"receiver": ("failed", "it is the other one's")}
        return again

    def push(
        self,
        request: Request,
        peer: PeerAddress | None = None,
        chunk: int = 6,
        first: int = 0,
        until: int | None = None,
        wait: bool = True,
    ) -> None:
        """Push blocks [first, until); the last one is final. Without `wait`, the caller calls `pushed`."""
        end = request.count if until is None else until
        chunks = [min(chunk, end - start) for start in range(first, end, chunk)]
        where = peer or request.receiver.peer
        command = "push", where, request.lease_id, request.seed, chunks, first, end == request.count
        if self._or_dies(request.sender, tell=command) and wait:
            self.pushed(request)

    def pushed(self, request: Request) -> None:
        self._or_dies(request.sender)

    def push_and_freeze(self, request: Request, point: str) -> None:
        """Push while the sender is about to freeze at a point. The sender answers after it has woken up."""
        self.push(request, wait=False)
        request.sender.wait_at(point)
        request.sender.await_frozen()
        request.sender.owes_answer = True

    def begin(self, sender: Child, receiver: Child, count: int = 24, **how: Any) -> Request:
        request = self.reserve(sender, receiver, count)
        if not request.outcomes:
            self.push(request, **how)
        return request

    def serve(self, sender: Child, receiver: Child, count: int = 24, **how: Any) -> Request:
        """Serve a request that must succeed."""
        request = self.begin(sender, receiver, count, **how)
        self.finish(request, deadline_s=SERVED_S)
        assert (request.sent, request.received) == ("completed", "completed"), request.outcomes
        return request

    def finish(
        self, *requests: Request, deadline_s: float = DEADLINE_S, of: str = "", allow_corrupt: bool = False
    ) -> None:
        """Wait until requests have ended at their living sides, or at `of` alone. Check the outcomes."""
        asked: dict[Child, list[Request]] = {}
        for request in requests:
            for child in (request.sender, request.receiver):
                if child.role not in request.outcomes and of in ("", child.role):
                    asked.setdefault(child, []).append(request)
        began = time.monotonic()
        waiting = [
            child
            for child in asked
            if not child.frozen
            and self._or_dies(
                child, tell=("results", [request.lease_id for request in asked[child]], deadline_s)
            )
        ]
        for child in waiting:
            try:
                outcomes = child.answer()
            except DiedError:
                continue
            for request in asked[child]:
                request.outcomes[child.role] = outcomes[request.lease_id]
        assert time.monotonic() - began < deadline_s + 2, "the ends of the requests came too late"
        for request in requests:
            _check(request, allow_corrupt)

    @staticmethod
    def _or_dies(child: Child, tell: tuple[Any, ...] = ()) -> bool:
        """Send a command, or take the answer to one. Return whether the child is still alive."""
        try:
            child.tell(*tell) if tell else child.answer()
        except DiedError:
            if not child.frozen:
                child.join()
            return False
        return True

    # --- afterwards -------------------------------------------------------------------------------

    def check(self, *survivors: Child) -> None:
        """Check that nothing is left of the requests, and that survivors serve another one and release it."""
        for child in survivors:
            assert child.alive, f"{child.worker_id} died"
            self._expect_nothing(child, "problems")
            if child.role == "sender":  # else the sender may try a link that leads nowhere
                assert not (links := child.ask("leave", self._gone)), links
        self._serve_next(*survivors)
        for child in self._children:
            if child not in survivors:
                self._part_with(child)
        senders = [child for child in survivors if child.role == "sender"]
        receivers = [child for child in survivors if child.role == "receiver"]
        for first, others in ((senders, receivers), (receivers, senders)):
            for child in first:
                self._expect_nothing(child, "shut")
                child.role = ""
            for child in others:
                if child.role:
                    self._expect_nothing(child, "left")
        wait_no_orphans(self._segments)

    def _serve_next(self, *survivors: Child) -> None:
        """Let pairs of survivors serve each other. A survivor without a partner gets a fresh one."""
        senders = [child for child in survivors if child.role == "sender"]
        receivers = [child for child in survivors if child.role == "receiver"]
        own = {"size": survivors[0].size, "tls": survivors[0].tls, "network": survivors[0].network}
        if not senders:
            senders = [self.sender("prefill-fresh", **own)]
        if not receivers:
            receivers = [self.receiver("decode-fresh", **own)]
        for sender in senders:
            for receiver in receivers:
                self.serve(sender, receiver, 8, chunk=4)
                for child in (sender, receiver):
                    self._expect_nothing(child, "problems")

    def _part_with(self, child: Child) -> None:
        """Dispose of a process that is no survivor. A frozen one keeps its connections until it is killed."""
        if child.frozen:
            child.kill()
        elif child.alive and child.role:
            self._expect_nothing(child, "shut")
            child.role = ""

    @staticmethod
    def _expect_nothing(child: Child, of: str) -> None:
        found = child.ask(of)
        assert not found, "\n".join([f"{of} of {child.worker_id}: {found}", *child.ask("log")])

    def close(self) -> None:
        for proxy in self._proxies:
            proxy.close()
        for child in self._children:
            if child.alive and not child.frozen and not child.role:
                self._stock.give(child)
            else:
                child.dispose()


def _check(request: Request, allow_corrupt: bool) -> None:
    """Check that each living side has the right bytes or one clear error in time, and that both agree."""
    for role, (status, reason) in request.outcomes.items():
        assert status in ("completed", "failed", "expired") or allow_corrupt, (role, status, reason, request)
        assert status == "completed" or reason, (role, request)
    if request.sent == "completed" and request.received and not allow_corrupt:
        assert request.received == "completed" or CLOSED_EARLY in request.reasons, request
