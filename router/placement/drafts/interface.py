"""The inputs and results of the decision where drafts are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from protocol.costs import UNKNOWN_COSTS, StepCosts
from protocol.speculation import Method, SpeculationState

DraftSite = Literal["none", "local", "remote"]


class DraftMaker(NamedTuple):
    """The worker that drafts: none without a `method`, the decode worker without `at`."""

    method: Method | None = None
    at: str | None = None

    @property
    def where(self) -> DraftSite:
        if self.method is None:
            return "none"
        return "local" if self.at is None else "remote"


class DraftPlace(NamedTuple):
    """The worker that drafts up to `max_tokens` in a step. No worker drafts without a `method`; the decode
    worker drafts without `at`, else the draft worker `at` does.
    """

    method: Method | None = None
    max_tokens: int = 0
    at: str | None = None

    @property
    def where(self) -> DraftSite:
        return self.maker.where

    @property
    def maker(self) -> DraftMaker:
        return DraftMaker(self.method, self.at)


NOWHERE = DraftPlace()


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """A request, with `num_tokens` so far, that is expected to generate `tokens_left` more.

    It drafts at `current` now; None: it begins, and others like it draft with `others`. If `trial` is set,
    all of them are to draft with it for a while, to measure it.
    """

    num_tokens: int = 0
    tokens_left: float = 128.0
    current: DraftPlace | None = None
    others: DraftMaker | None = None
    trial: DraftMaker | None = None


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """A decode worker that runs `rows` requests with `context_tokens` in all.

    By default it drafts with `method` (None: not at all) and `fixed_tokens` in each step (None: as many as
    pay). `drafts_itself` says that it has what drafting needs.
    """

    rows: float = 1.0
    context_tokens: float = 0.0
    costs: StepCosts = UNKNOWN_COSTS
    speculation: SpeculationState | None = None
    method: Method | None = None
    fixed_tokens: int | None = None
    drafts_itself: bool = True


class DraftOption(NamedTuple):
    """The prediction for a place if all requests of the batch drafted there.

    `rate`: tokens a second of the batch. `worth`: the same over the rest of the request, less the time until
    its drafter has read its text. Both include `correction`, the ratio of observed to predicted.
    `tokens_per_step` is of one request. `is_seen`: it was observed at about this load.
    """

    place: DraftPlace
    rate: float
    worth: float
    tokens_per_step: float
    correction: float = 1.0
    is_seen: bool = False


@dataclass(frozen=True, slots=True)
class DraftDecision:
    chosen: DraftOption
    options: Sequence[DraftOption] = ()
    reason: str = ""

    @property
    def place(self) -> DraftPlace:
        return self.chosen.place
