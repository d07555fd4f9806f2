"""How likely the target is to accept a request's drafts, learned from those that it verified.

A chain's token i can only be accepted after token i - 1, so what is kept are the conditional rates by
position; their running products are the survival probabilities S(i), those of token i being accepted. A
request's rates start from its method's and fade as its text goes on.
"""

from __future__ import annotations

FIRST_GUESS = 0.6
"""Conditional rate at every position before anything is known."""
_GUESS_WEIGHT = 8.0
_POOL_DECAY = 0.998
"""For each draft of a method."""
_PRIOR_WEIGHT = 3.0
"""Drafts of its own after which a request's rate counts as much as its method's."""
_TOKEN_DECAY = 0.97
"""For each token of the request's text: half of what was learned is forgotten after 23 tokens."""
_STALE = 8
"""Tokens without a draft from which on what was learned gets older with each choice."""
_SHARE_DECAY = 0.95
"""For each step in which a request was to draft."""
_SHARE_WEIGHT = 8.0
"""Tokens to draft after which a request's share counts as much as its method's."""
_NEWS = 64
"""Drafts of its method's after which a request's survival is worked out anew."""


class MethodAcceptance:
    """Conditional rates by position, over all requests of a method. Position 0 is the first drafted token."""

    def __init__(self, num_positions: int) -> None:
        self._accepted = [FIRST_GUESS * _GUESS_WEIGHT] * num_positions
        self._tried = [_GUESS_WEIGHT] * num_positions
        self.num_drafts = 0
        self.share = 1.0
        """How much of what requests were to draft was drafted: a method may find nothing."""

    @property
    def num_positions(self) -> int:
        return len(self._tried)

    def rates(self) -> list[float]:
        """May be called from any thread."""
        return [min(self.rate(position), 1.0) for position in range(self.num_positions)]

    def rate(self, position: int) -> float:
        return self._accepted[position] / self._tried[position]

    def observe_share(self, num_granted: int, num_drafted: int) -> None:
        """Of `num_granted` tokens that a request was to draft, it drafted so many."""
        self.share += (1 - _POOL_DECAY) * (num_drafted / num_granted - self.share)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Of a draft, `num_drafted` tokens deep, the first `num_accepted` were accepted."""
        self.num_drafts += 1
        for position in range(min(num_accepted + 1, num_drafted, len(self._tried))):
            self._accepted[position] *= _POOL_DECAY
            self._tried[position] *= _POOL_DECAY
            self._tried[position] += 1.0
            if position < num_accepted:
                self._accepted[position] += 1.0


class Acceptance:
    """One request's rates, and the `share` that was drafted of what it was to draft.

    What it is shown mostly counts for its method too.
    """

    def __init__(self, method: MethodAcceptance) -> None:
        self._method = method
        self._accepted = [0.0] * method.num_positions
        self._tried = [0.0] * method.num_positions
        self._last_place: int | None = None
        self._granted = _SHARE_WEIGHT
        self._drafted = _SHARE_WEIGHT * method.share
        self._survival: list[float] = []
        self._known = 0

    @property
    def share(self) -> float:
        return self._drafted / self._granted

    def survival(self) -> list[float]:
        """S(i) for each position: never rising, between 0 and 1. Not to be changed."""
        if not self._survival or self._method.num_drafts - self._known >= _NEWS:
            self._survival = self._survivals()
            self._known = self._method.num_drafts
        return self._survival

    def _survivals(self) -> list[float]:
        survivals = []
        survival = 1.0
        before: float | None = None
        for position, (accepted, tried) in enumerate(zip(self._accepted, self._tried, strict=True)):
            prior = self._method.rate(position)
            if before is not None:  # text that is easy at one position is so at the next
                prior = (prior + before) / 2
            before = (accepted + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT)
            survival *= before
            survivals.append(survival)
        return survivals

    def grow(self, place: int) -> None:
        """The request is `place` tokens long by now. Not drafting, it comes back to its method's rates:
        text that was hard is not taken to stay so.
        """
        if self._last_place is not None and place - self._last_place >= _STALE:
            self._fade(place)
            self._survival = []

    def _fade(self, place: int) -> None:
        if self._last_place is not None:
            kept = _TOKEN_DECAY ** max(place - self._last_place, 0)
            self._accepted = [accepted * kept for accepted in self._accepted]
            self._tried = [tried * kept for tried in self._tried]
        self._last_place = place

    def observe_share(self, num_granted: int, num_drafted: int) -> None:
        """Of `num_granted` tokens that it was to draft, it drafted so many."""
        self._method.observe_share(num_granted, num_drafted)
        self._granted = _SHARE_DECAY * self._granted + num_granted
        self._drafted = _SHARE_DECAY * self._drafted + num_drafted

    def observe(self, num_drafted: int, num_accepted: int, place: int, *, is_blind: bool = False) -> None:
        """Of a draft, `num_drafted` tokens deep, the first `num_accepted` were accepted.

        `place` is the request's number of tokens. A blind draft tells nothing of other requests.
        """
        if not is_blind:
            self._method.observe(num_drafted, num_accepted)
        self._fade(place)
        for position in range(min(num_accepted + 1, num_drafted, len(self._tried))):
            self._tried[position] += 1.0
            if position < num_accepted:
                self._accepted[position] += 1.0
        self._survival = []
