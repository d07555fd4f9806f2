"""How likely drafted tokens are to be accepted, learned from those that were verified.

Token i of a draft can only be accepted after token i - 1. So a method has a conditional rate for each
position, over all of its requests. A request has one number beside that, how hard its text is: its own
rejections over those expected from the method's rates, fading as the text goes on.
"""

from __future__ import annotations

from speculation.control.settings import Settings


class MethodAcceptance:
    """Conditional acceptance rates by position. `found` is the share of granted tokens that was drafted."""

    def __init__(self, num_positions: int, settings: Settings) -> None:
        self._settings = settings
        self._tried = [settings.first_weight] * num_positions
        self._accepted = [settings.first_weight * settings.first_rate] * num_positions
        self.found = 1.0
        self._num_drafts = 0

    def part(self) -> MethodAcceptance:
        """For some of its requests: begins with these rates, as little certain as before any draft."""
        part = MethodAcceptance(len(self._tried), self._settings)
        part._accepted = [self._settings.first_weight * rate for rate in self.rates()]
        return part

    def rates(self) -> list[float]:
        """May be called from any thread."""
        pairs = zip(self._accepted, self._tried, strict=True)
        return [min(accepted / tried, 1.0) for accepted, tried in pairs]

    def observe(self, depth: int, num_accepted: int) -> None:
        """The first `num_accepted` tokens of a draft of `depth` were accepted."""
        kept = 1 - 1 / self._settings.method_memory
        for position in range(min(num_accepted + 1, depth, len(self._tried))):
            self._tried[position] = kept * self._tried[position] + 1
            self._accepted[position] = kept * self._accepted[position] + (position < num_accepted)

    def observe_found(self, num_granted: int, num_drafted: int) -> None:
        """Of `num_granted` tokens that a request was to draft, it drafted `num_drafted`."""
        self._num_drafts += 1
        pace = max(1 / self._settings.method_memory, 1 / (self._settings.first_weight + self._num_drafts))
        self.found += pace * (num_drafted / num_granted - self.found)


class RequestAcceptance:
    """One request's chances. What it shows counts for its method too, and for its class with that method."""

    def __init__(
        self, method: MethodAcceptance, settings: Settings, of_class: MethodAcceptance | None = None
    ) -> None:
        self._method = method
        self._of_class = of_class
        self._settings = settings
        self._rejected = 0.0
        self._expected = 0.0
        self._place = 0

    @property
    def found(self) -> float:
        return self._method.found

    def survival(self) -> list[float]:
        """For each position the chance that a draft is accepted up to there."""
        weight = self._settings.own_weight
        hardness = (self._rejected + weight) / (self._expected + weight)
        survival, chance = [], 1.0
        for rate in self._method.rates():
            chance *= max(1 - hardness * (1 - rate), 0.0)
            survival.append(chance)
        return survival

    def age(self, place: int) -> None:
        """The request is `place` tokens long by now: what was learned fades."""
        kept = (1 - 1 / self._settings.text_memory) ** max(place - self._place, 0)
        self._rejected *= kept
        self._expected *= kept
        self._place = place

    def observe(self, depth: int, num_accepted: int, place: int, *, is_blind: bool = False) -> None:
        """Of a draft. `is_blind`: made with truncated context, so that it tells nothing of other requests."""
        self.age(place)
        self._rejected += num_accepted < depth
        self._expected += sum([1 - rate for rate in self._method.rates()[: min(num_accepted + 1, depth)]])
        if not is_blind:
            self._method.observe(depth, num_accepted)
            if self._of_class is not None:
                self._of_class.observe(depth, num_accepted)

    def observe_found(self, num_granted: int, num_drafted: int) -> None:
        self._method.observe_found(num_granted, num_drafted)
