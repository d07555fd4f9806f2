"""Whose router is gone: its requests are ended here, for nobody will ask for their tokens or abort them.

A router keeps its requests alive by being connected. One that was started anew is another incarnation, which
keeps none of its predecessor's.
"""

from __future__ import annotations

from collections.abc import Iterable

from protocol.ids import router_of
from worker.link import RouterLinks


class RouterLeases:
    """Belongs to the loop's thread. `ttl_s`: how long a router may be away."""

    def __init__(self, links: RouterLinks, ttl_s: float) -> None:
        self._links = links
        self._ttl_s = ttl_s
        self._last_seen: dict[str, float] = {}

    def expired(self, request_ids: Iterable[str], now: float) -> list[str]:
        """Those of routers that are gone, while others could use what they hold.

        While no router is there, nobody could, and the worker ends itself if that lasts.
        """
        present = {link.router for link in self._links if link.stands and link.router is not None}
        if not present:
            return []
        owners = {request_id: router_of(request_id) for request_id in request_ids}
        seen = {router: self._last_seen.get(router, now) for router in owners.values()}
        self._last_seen = seen | dict.fromkeys(present, now)
        return [id for id, router in owners.items() if now - self._last_seen[router] > self._ttl_s]
