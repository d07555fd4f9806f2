"""Ends the requests of routers that are gone; such a router neither receives their tokens nor aborts them.

A router keeps its requests alive by being connected. A restarted router is another incarnation and has none
of its predecessor's requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.ids import router_of
from worker.link import RouterLinks


class RouterLeases:
    """Tracks when each router was last connected. Belongs to the loop's thread. A router may be away for
    `ttl_s`.
    """

    def __init__(self, links: RouterLinks, ttl_s: float) -> None:
        self._links = links
        self._ttl_s = ttl_s
        self._last_seen: dict[str, float] = {}

    def expired(self, request_ids: Iterable[str], now: float) -> list[str]:
        """Return the requests whose routers are gone, if another router is connected and can use their
        resources.

        Without a connected router the result is empty; if that lasts, the worker ends itself.
        """
        present = {link.router for link in self._links if link.stands and link.router is not None}
        if not present:
            return []
        owners = {request_id: router_of(request_id) for request_id in request_ids}
        seen = {router: self._last_seen.get(router, now) for router in owners.values()}
        self._last_seen = seen | dict.fromkeys(present, now)
        return [id for id, router in owners.items() if now - self._last_seen[router] > self._ttl_s]
