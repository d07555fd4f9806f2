"""Counters of a worker's transfers, in total and per peer and transport, and each peer's wire speed."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from protocol.metrics import PAIR_COUNTERS
from protocol.worker_to_router import PairState

_NAMES = {metric.name for metric in PAIR_COUNTERS}


class TransferCounters:
    """Totals by name since construction."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._totals[name] += amount

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)


_FADE = 0.95
"""Weight of all earlier observations against the newest: about 20 observations count."""


class WireSpeed:
    """A fit by least squared relative errors: seconds = `latency_s` * pieces + bytes / `bytes_per_s`."""

    def __init__(self) -> None:
        self._last = (0.0, 0.0, 0.0)
        self._pieces = self._bytes = self._mixed = 0.0
        self._pieces_s = self._bytes_s = 0.0
        self.latency_s = 0.0
        self.bytes_per_s = 0.0
        """Bandwidth; 0 until something was measured."""

    def look(self, pieces: float, nbytes: float, seconds: float) -> None:
        """Observe new totals. They count as an observation only if all three have grown."""
        gained = (pieces - self._last[0], nbytes - self._last[1], seconds - self._last[2])
        if min(gained) <= 0:
            return
        self._last = (pieces, nbytes, seconds)
        each, size, took = gained
        self._pieces = _FADE * self._pieces + each * each / took**2
        self._bytes = _FADE * self._bytes + size * size / took**2
        self._mixed = _FADE * self._mixed + each * size / took**2
        self._pieces_s = _FADE * self._pieces_s + each / took
        self._bytes_s = _FADE * self._bytes_s + size / took
        self._solve()

    def _solve(self) -> None:
        """Solve the fit. If all observations are alike, attribute all time to bandwidth."""
        independent = self._pieces * self._bytes - self._mixed**2
        if independent > 1e-3 * self._pieces * self._bytes:
            per_piece = (self._pieces_s * self._bytes - self._bytes_s * self._mixed) / independent
            per_byte = (self._bytes_s * self._pieces - self._pieces_s * self._mixed) / independent
            if per_piece >= 0 and per_byte > 0:
                self.latency_s, self.bytes_per_s = per_piece, 1 / per_byte
                return
        self.latency_s, self.bytes_per_s = 0.0, self._bytes / self._bytes_s


MAX_PEERS = 128
"""Most peers that are remembered; the least recently used one is forgotten first."""

RefusalKind = Literal[
    "unavailable", "not_offered", "other_host", "refused", "unreachable", "timeout", "broken"
]
"""Reasons why a transport does not serve a pair. `broken`: it did before, and will be tried again."""


@dataclass
class _Pair:
    counters: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    speed: WireSpeed = field(default_factory=WireSpeed)
    refused: RefusalKind | None = None
    reason: str = ""


class Pairs:
    """The transfers with each peer since the first contact, by transport. Thread-safe."""

    def __init__(self, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, dict[str, _Pair]] = OrderedDict()

    def add(self, peer: str, transport: str, amounts: Mapping[str, float]) -> None:
        """Add amounts to `PAIR_COUNTERS`. `transport` is empty for amounts that belong to no transport."""
        assert amounts.keys() <= _NAMES
        with self._lock:
            counters = self._pair(peer, transport).counters
            for name, amount in amounts.items():
                counters[name] += amount

    def error(self, peer: str, transport: str, kind: str, count: int = 1) -> None:
        with self._lock:
            self._pair(peer, transport).counters[f"kv_transfer_errors_total{{kind={kind}}}"] += count

    def refuse(self, peer: str, transport: str, refusal: RefusalKind, reason: str) -> bool:
        """Record why a transport does not serve the pair. Return whether this is new and to be logged.

        `peer` is empty for a transport that this worker cannot offer to any peer.
        """
        with self._lock:
            pair = self._pair(peer, transport)
            is_news = pair.refused != refusal
            pair.refused, pair.reason = refusal, reason[:512]
            return is_news

    def accept(self, peer: str, transport: str) -> None:
        """Remove the recorded reason why the transport did not serve the pair."""
        with self._lock:
            pair = self._peers.get(peer, {}).get(transport)
            if pair is not None:
                pair.refused, pair.reason = None, ""

    def snapshot(self, in_use: Mapping[str, str]) -> list[PairState]:
        """Return the state of all pairs. `in_use` maps each peer to its transport in use."""
        with self._lock:
            for pairs in self._peers.values():
                for pair in pairs.values():
                    _look(pair)
            return [
                PairState(
                    peer=peer,
                    transport=transport,
                    in_use=bool(transport) and in_use.get(peer) == transport,
                    refused=pair.refused or "",
                    reason=pair.reason,
                    latency_s=pair.speed.latency_s,
                    bytes_per_s=pair.speed.bytes_per_s,
                    counters=dict(pair.counters),
                )
                for peer, pairs in self._peers.items()
                for transport, pair in pairs.items()
            ]

    def _pair(self, peer: str, transport: str) -> _Pair:
        pairs = self._peers.setdefault(peer, {})
        self._peers.move_to_end(peer)
        if len(self._peers) > self._max_peers:
            self._peers.popitem(last=False)
        return pairs.setdefault(transport, _Pair())


def _look(pair: _Pair) -> None:
    """Measure the wire in bytes of KV, even if coding sends fewer bytes."""
    counters = pair.counters
    pair.speed.look(
        counters.get("kv_transfer_pieces_total", 0.0),
        counters.get("kv_transfer_uncoded_bytes_total", 0.0),
        counters.get("kv_transfer_wire_seconds_total", 0.0),
    )
