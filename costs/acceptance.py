"""How likely drafted tokens are to be accepted, learned from those that were verified.

Token i of a draft can only be accepted after token i - 1. So a method has a conditional rate for each
position, over all of its requests. A request has one number besides, how hard its text is: its own rejections
over those expected from the method's rates, fading as the text goes on.
"""

from __future__ import annotations

FIRST_RATE = 0.75
"""[share] Acceptance at each position before any draft. Optimistic: what is tried is soon known, what is not
tried never.
"""
FIRST_WEIGHT = 20.0
"""[drafts] The weight of `FIRST_RATE`: a method that fails is given up after about so many."""
METHOD_MEMORY = 500.0
"""[drafts] A method's rates are averaged over so many: those of a few dozen requests."""
OWN_WEIGHT = 1.0
"""[rejections] The weight of the method's rates against a request's own: a few failures in a row stop a
request of a good method.
"""
TEXT_MEMORY = 16.0
"""[tokens] A request's own rates fade over so many: hard passages of code are hardly longer."""


class MethodAcceptance:
    """Conditional acceptance rates by position. `found` is the share of granted tokens that was drafted."""

    def __init__(self, num_positions: int, rates: list[float] | None = None) -> None:
        """Begin with these `rates`, as uncertain as before any draft."""
        self._tried = [FIRST_WEIGHT] * num_positions
        self._accepted = [FIRST_WEIGHT * rate for rate in rates or [FIRST_RATE] * num_positions]
        self.found = 1.0
        self._num_drafts = 0

    def rates(self) -> list[float]:
        """Return the rates. May be called from any thread."""
        pairs = zip(self._accepted, self._tried, strict=True)
        return [min(accepted / tried, 1.0) for accepted, tried in pairs]

    def observe(self, depth: int, num_accepted: int) -> None:
        """Note that the first `num_accepted` tokens of a draft of `depth` were accepted."""
        kept = 1 - 1 / METHOD_MEMORY
        for position in range(min(num_accepted + 1, depth, len(self._tried))):
            self._tried[position] = kept * self._tried[position] + 1
            self._accepted[position] = kept * self._accepted[position] + (position < num_accepted)

    def observe_found(self, num_granted: int, num_drafted: int) -> None:
        """Note that a request drafted `num_drafted` of the `num_granted` tokens that it might."""
        self._num_drafts += 1
        pace = max(1 / METHOD_MEMORY, 1 / (FIRST_WEIGHT + self._num_drafts))
        self.found += pace * (num_drafted / num_granted - self.found)


class RequestAcceptance:
    """One request's chances. Its drafts count for its method too, and for its class with that method."""

    def __init__(self, method: MethodAcceptance, of_class: MethodAcceptance | None = None) -> None:
        self.method = method
        self._of_class = of_class
        self._rejected = 0.0
        self._expected = 0.0
        self._place = 0

    def survival(self) -> list[float]:
        """Return for each position the chance that a draft is accepted up to there."""
        hardness = (self._rejected + OWN_WEIGHT) / (self._expected + OWN_WEIGHT)
        survival, chance = [], 1.0
        for rate in self.method.rates():
            chance *= max(1 - hardness * (1 - rate), 0.0)
            survival.append(chance)
        return survival

    def age(self, place: int) -> None:
        """Let what was learned fade: the request is `place` tokens long by now."""
        kept = (1 - 1 / TEXT_MEMORY) ** max(place - self._place, 0)
        self._rejected *= kept
        self._expected *= kept
        self._place = place

    def observe(self, depth: int, num_accepted: int, place: int, *, is_blind: bool = False) -> None:
        """Learn from a draft. `is_blind`: it was made with truncated context, so it tells nothing of other
        requests.
        """
        self.age(place)
        self._rejected += num_accepted < depth
        self._expected += sum([1 - rate for rate in self.method.rates()[: min(num_accepted + 1, depth)]])
        for shared in (self.method, self._of_class):
            if shared is not None and not is_blind:
                shared.observe(depth, num_accepted)
