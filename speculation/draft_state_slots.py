"""Which request has which state slot for the state of a draft model's recurrent layers."""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv.state_slots import StateSlots


class DraftStateSlots:
    """A state slot for each request that drafts. There are as many as sequences that run at a time, so one
    that finds none takes that of a request which does not run: the one that has not drafted for longest.
    """

    def __init__(self, state_slots: StateSlots) -> None:
        self.state_slots = state_slots
        self._taken: dict[str, int] = {}
        """In the order of their latest drafts."""

    def __getitem__(self, request_id: str) -> int:
        return self._taken[request_id]

    def sit(self, request_ids: Iterable[str]) -> list[str]:
        """They draft now, and have state slots. Returns those whose state slots they took."""
        newcomers = []
        for request_id in request_ids:
            if request_id in self._taken:
                self._taken[request_id] = self._taken.pop(request_id)
            else:
                newcomers.append(request_id)
        ousted = []
        for request_id in newcomers:
            if not self.state_slots.num_free:
                ousted.append(next(iter(self._taken)))
                self.forget(ousted[-1])
            self._taken[request_id] = self.state_slots.take()
        return ousted

    def forget(self, request_id: str) -> None:
        """It drafts no more. Unknown ids are ignored."""
        if request_id in self._taken:
            self.state_slots.give_back(self._taken.pop(request_id))
