"""Requests that wait for one worker: by priority, and fairly among API keys within one.

Deficit round robin (Shreedhar and Varghese, 1995): the keys whose requests wait take turns. With each turn a
key may spend `QUANTUM` tokens more, and its next request goes once that covers the request's cost. What a key
saves is gone when it waits for nothing any more, so idle time earns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

QUANTUM = 16.0
"""[tokens] Less than most requests cost, so that keys alternate as finely as their requests allow."""

Item = TypeVar("Item", bound=Hashable)


@dataclass(eq=False)
class _Flow(Generic[Item]):
    """What waits of one key and one priority, with its cost, the oldest first."""

    costs: dict[Item, float] = field(default_factory=dict)
    total: float = 0.0
    deficit: float = 0.0

    @property
    def oldest(self) -> Item:
        return next(iter(self.costs))

    @property
    def missing(self) -> float:
        """For its oldest to go."""
        return self.costs[self.oldest] - self.deficit


class FairQueue(Generic[Item]):
    """`sent(key)` is the cost of what a key has at the worker.

    A key that begins to wait owes what it has there beyond the one that has least. So who filled the worker
    while nobody else was there does not keep it, whatever it sends.
    """

    def __init__(self, sent: Callable[[str], float]) -> None:
        self._sent = sent
        self._turns: dict[int, dict[str, _Flow[Item]]] = {}
        """By priority, then by key: whose turn it is comes first."""
        self._places: dict[Item, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: Item) -> bool:
        return item in self._places

    def add(self, item: Item, key: str, priority: int, cost: float) -> None:
        """`cost` stays what it is now. A lower `priority` comes first."""
        flows = self._turns.setdefault(priority, {})
        if key not in flows:
            self._start(flows, key)
        flows[key].costs[item] = cost
        flows[key].total += cost
        self._places[item] = priority, key

    def remove(self, item: Item) -> None:
        """It waits no longer, and costs its key nothing."""
        priority, key = self._places.pop(item)
        flows = self._turns[priority]
        flows[key].total -= flows[key].costs.pop(item)
        if not flows[key].costs:
            del flows[key]
        if not flows:
            del self._turns[priority]

    def head(self) -> Item:
        """Whose turn it is. It keeps its turn until it is taken or removed."""
        flows = self._turns[min(self._turns)]
        turns = math.ceil(min(flow.missing for flow in flows.values()) / QUANTUM)
        for flow in flows.values():  # turns in which nobody could go
            flow.deficit += max(turns - 1, 0) * QUANTUM
        while True:
            key, flow = next(iter(flows.items()))
            if flow.missing <= 0:
                return flow.oldest
            flow.deficit += QUANTUM
            flows[key] = flows.pop(key)

    def pop(self, item: Item) -> None:
        """It goes: its key pays."""
        priority, key = self._places[item]
        flow = self._turns[priority][key]
        flow.deficit -= flow.costs[item]
        self.remove(item)

    def overtaken(self, key: str, priority: int, cost: float) -> float:
        """How many of those that wait a new request would come before."""
        count = 0.0
        for level, flows in self._turns.items():
            before = cost + (flows[key].total if key in flows else 0.0)
            for flow in flows.values():
                if level > priority:
                    count += len(flow.costs)
                elif level == priority and flow.total > before:
                    count += len(flow.costs) * (1 - before / flow.total)
        return count

    def _start(self, flows: dict[str, _Flow[Item]], key: str) -> None:
        """While a key was alone it took nothing from others: what it saved or owes begins anew."""
        owned = {other: self._sent(other) for other in (key, *flows)}
        least = min(owned.values())
        flows[key] = _Flow(deficit=least - owned[key])
        if len(flows) == 2:
            other = next(iter(flows))
            flows[other].deficit = least - owned[other]
