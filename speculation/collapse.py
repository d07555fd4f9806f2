"""Notices when a class of requests suddenly has far fewer drafts accepted than it used to.

A class is a method, and where its requests' KV comes from: that is what a drafter can be left blind by. What
is watched is the share of drafts whose first token is accepted, since it doesn't depend on how deep they are.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from protocol.speculation import Source
from speculation.account import Origin

logger = logging.getLogger("tandem.speculation")

_LATEST = 200
"""Drafts of which the latest mean is, roughly."""
_RUNNING = 2048
"""Drafts of which the running mean is."""
_ENOUGH = 256
"""Drafts before which nothing is said."""
_LOG_INTERVAL_S = 60.0


@dataclass(slots=True, eq=False)
class _Class:
    num_drafts: int = 0
    latest: float = 0.0
    running: float = 0.0
    collapsed: bool = False


class CollapseWatch:
    def __init__(self) -> None:
        self._classes: dict[tuple[Source, Origin], _Class] = {}
        self._next_log = 0.0

    def observe(self, method: Source, origin: Origin, accepted: bool) -> bool:
        """Whether with this draft the class has fallen below half of its running mean. It says so once, until
        it was back at three quarters.
        """
        known = self._classes.setdefault((method, origin), _Class())
        known.num_drafts += 1
        known.latest += (accepted - known.latest) / min(known.num_drafts, _LATEST)
        known.running += (accepted - known.running) / min(known.num_drafts, _RUNNING)
        if known.collapsed:
            known.collapsed = known.latest < 0.75 * known.running
            return False
        known.collapsed = known.num_drafts >= _ENOUGH and known.latest < 0.5 * known.running
        if known.collapsed:
            self._log(method, origin, known)
        return known.collapsed

    def _log(self, method: Source, origin: Origin, known: _Class) -> None:
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_INTERVAL_S
            logger.warning(
                "%s, prompt %s: the first token of %.0f %% of the drafts is accepted, after %.0f %% so far",
                method,
                origin.replace("_", " "),
                100 * known.latest,
                100 * known.running,
            )
