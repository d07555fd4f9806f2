"""The queue of requests that wait for one worker: by priority, and within a priority fair among API keys.

Deficit round robin (Shreedhar and Varghese, 1995): the keys with waiting requests take turns. Each turn lets
a key spend `QUANTUM` tokens more, and its next request goes once the saved tokens cover the request's cost.
A key loses its saved tokens when nothing of it waits any more, so idle time earns nothing.
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
    """The waiting items of one key and one priority with their costs, the oldest first."""

    costs: dict[Item, float] = field(default_factory=dict)
    total: float = 0.0
    deficit: float = 0.0

    @property
    def oldest(self) -> Item:
        return next(iter(self.costs))

    @property
    def missing(self) -> float:
        """The tokens that the key must still save for its oldest item."""
        return self.costs[self.oldest] - self.deficit


class FairQueue(Generic[Item]):
    """Items that wait for one worker. `sent(key)` returns the cost of the key's items that the worker has.

    A key that begins to wait owes the cost that it has at the worker beyond the key that has least. So a key
    that filled the worker while no other key waited does not keep it, whatever it sends.
    """

    def __init__(self, sent: Callable[[str], float]) -> None:
        self._sent = sent
        self._turns: dict[int, dict[str, _Flow[Item]]] = {}
        """By priority, then by key; the first key has the turn."""
        self._places: dict[Item, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: Item) -> bool:
        return item in self._places

    def add(self, item: Item, key: str, priority: int, cost: float) -> None:
        """Add an item. Its `cost` is fixed. A lower `priority` comes first."""
        flows = self._turns.setdefault(priority, {})
        if key not in flows:
            self._start(flows, key)
        flows[key].costs[item] = cost
        flows[key].total += cost
        self._places[item] = priority, key

    def remove(self, item: Item) -> None:
        """Remove an item at no cost to its key."""
        priority, key = self._places.pop(item)
        flows = self._turns[priority]
        flows[key].total -= flows[key].costs.pop(item)
        if not flows[key].costs:
            del flows[key]
        if not flows:
            del self._turns[priority]

    def head(self) -> Item:
        """Return the item whose turn it is. It keeps its turn until `pop` or `remove`."""
        flows = self._turns[min(self._turns)]
        turns = math.ceil(min(flow.missing for flow in flows.values()) / QUANTUM)
        for flow in flows.values():  # the turns in which no key could go
            flow.deficit += max(turns - 1, 0) * QUANTUM
        while True:
            key, flow = next(iter(flows.items()))
            if flow.missing <= 0:
                return flow.oldest
            flow.deficit += QUANTUM
            flows[key] = flows.pop(key)

    def pop(self, item: Item) -> None:
        """Remove the item that goes, and charge its cost to its key."""
        priority, key = self._places[item]
        flow = self._turns[priority][key]
        flow.deficit -= flow.costs[item]
        self.remove(item)

    def overtaken(self, key: str, priority: int, cost: float) -> float:
        """Return the expected number of waiting items that a new one would go before."""
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
        """Start a key's queue. A key that waited alone took nothing from others, so its savings or debt are
        reset.
        """
        owned = {other: self._sent(other) for other in (key, *flows)}
        least = min(owned.values())
        flows[key] = _Flow(deficit=least - owned[key])
        if len(flows) == 2:
            other = next(iter(flows))
            flows[other].deficit = least - owned[other]
