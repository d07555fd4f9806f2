"""Estimates of how likely draft tokens are to be accepted, learned from verified drafts.

Token i of a draft can only be accepted after token i - 1, so each method has a conditional rate for each
position, over all of its requests. Each request has one more number, the hardness of its text: its rejections
divided by those that the method's rates predict. Both counts fade as the text grows.
"""

from __future__ import annotations

FIRST_RATE = 0.75
"""[share] Acceptance at each position before any draft. It is optimistic, because a method that is never
tried is never measured.
"""
FIRST_WEIGHT = 20.0
"""[drafts] The weight of `FIRST_RATE`: a method that fails is given up after about as many drafts."""
METHOD_MEMORY = 500.0
"""[drafts] A method's rates average over as many of its latest drafts: those of a few dozen requests."""
OWN_WEIGHT = 1.0
"""[rejections] The weight of the method's rates against a request's own rejections. It is low, so that a few
failures in a row stop drafting for a request of a good method.
"""
TEXT_MEMORY = 16.0
"""[tokens] A request's counts average over as many of its latest tokens: about a hard passage of code."""


class MethodAcceptance:
    """A method's conditional acceptance rates by position. `found`: the share of granted tokens drafted."""

    def __init__(self, num_positions: int, rates: list[float] | None = None) -> None:
        """Start from `rates`, with the same uncertainty as before any draft."""
        self._tried = [FIRST_WEIGHT] * num_positions
        self._accepted = [FIRST_WEIGHT * rate for rate in rates or [FIRST_RATE] * num_positions]
        self.found = 1.0
        self._num_drafts = 0

    def rates(self) -> list[float]:
        """Return the rates. May be called from any thread."""
        pairs = zip(self._accepted, self._tried, strict=True)
        return [min(accepted / tried, 1.0) for accepted, tried in pairs]

    def observe(self, depth: int, num_accepted: int) -> None:
        """Record that the first `num_accepted` tokens of a draft of `depth` tokens were accepted."""
        kept = 1 - 1 / METHOD_MEMORY
        for position in range(min(num_accepted + 1, depth, len(self._tried))):
            self._tried[position] = kept * self._tried[position] + 1
            self._accepted[position] = kept * self._accepted[position] + (position < num_accepted)

    def observe_found(self, num_granted: int, num_drafted: int) -> None:
        """Record that a request drafted `num_drafted` of the `num_granted` tokens that it was allowed."""
        self._num_drafts += 1
        pace = max(1 / METHOD_MEMORY, 1 / (FIRST_WEIGHT + self._num_drafts))
        self.found += pace * (num_drafted / num_granted - self.found)


class RequestAcceptance:
    """One request's acceptance. Its drafts also count for its method, and for its class with that method."""

    def __init__(self, method: MethodAcceptance, of_class: MethodAcceptance | None = None) -> None:
        self.method = method
        self._of_class = of_class
        self._rejected = 0.0
        self._expected = 0.0
        self._place = 0

    def survival(self) -> list[float]:
        """Return for each position the probability that a draft is accepted up to and including it."""
        hardness = (self._rejected + OWN_WEIGHT) / (self._expected + OWN_WEIGHT)
        survival, chance = [], 1.0
        for rate in self.method.rates():
            chance *= max(1 - hardness * (1 - rate), 0.0)
            survival.append(chance)
        return survival

    def age(self, place: int) -> None:
        """Fade the counts of earlier drafts, now that the request is `place` tokens long."""
        kept = (1 - 1 / TEXT_MEMORY) ** max(place - self._place, 0)
        self._rejected *= kept
        self._expected *= kept
        self._place = place

    def observe(self, depth: int, num_accepted: int, place: int) -> None:
        """Learn from a draft of `depth` tokens, of which the first `num_accepted` were accepted."""
        self.age(place)
        self._rejected += num_accepted < depth
        self._expected += sum([1 - rate for rate in self.method.rates()[: min(num_accepted + 1, depth)]])
        for shared in (self.method, self._of_class):
            if shared is not None:
                shared.observe(depth, num_accepted)
