"""What the placement of drafts sees and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from protocol.costs import UNKNOWN_COSTS, StepCosts
from protocol.speculation import Method, SpeculationState

Where = Literal["none", "local", "remote"]


class DraftMaker(NamedTuple):
    """Who drafts, with whatever ceiling: nobody without a `method`, who decodes without `at`."""

    method: Method | None = None
    at: str | None = None

    @property
    def where(self) -> Where:
        if self.method is None:
            return "none"
        return "local" if self.at is None else "remote"


class DraftPlace(NamedTuple):
    """Who drafts up to `max_tokens` in a step: nobody without a `method`, who decodes without `at`, else that
    draft worker.
    """

    method: Method | None = None
    max_tokens: int = 0
    at: str | None = None

    @property
    def where(self) -> Where:
        return self.maker.where

    @property
    def maker(self) -> DraftMaker:
        return DraftMaker(self.method, self.at)


NOWHERE = DraftPlace()


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """A request, with `num_tokens` so far, that is expected to bring `tokens_left` more.

    It drafts at `current` now; None: it begins, and others like it draft with `others`. All are to draft with
    `trial` for a while, to show what that brings.
    """

    num_tokens: int = 0
    tokens_left: float = 128.0
    current: DraftPlace | None = None
    others: DraftMaker | None = None
    trial: DraftMaker | None = None


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """A decode worker that runs `rows` requests with `context_tokens` in all.

    By default it drafts with `method`, None: not at all; `fixed_tokens` in each step, None: as many as pay.
    With `drafts_itself` it has what that takes.
    """

    rows: float = 1.0
    context_tokens: float = 0.0
    costs: StepCosts = UNKNOWN_COSTS
    speculation: SpeculationState | None = None
    method: Method | None = None
    fixed_tokens: int | None = None
    drafts_itself: bool = True


@dataclass(frozen=True, slots=True)
class SharedDrafter:
    """A draft worker, as one target sees it.

    It drafts with `method` for `others` requests of other targets, with `context_tokens` each, and has
    `waiting_tokens` of texts to read. Whoever tells it something between two steps has its answer, between
    two steps, after `answer_s`; 0: that was not measured.
    """

    worker_id: str
    method: Method
    costs: StepCosts = UNKNOWN_COSTS
    others: float = 0.0
    context_tokens: float = 0.0
    waiting_tokens: float = 0.0
    answer_s: float = 0.0


class DraftOption(NamedTuple):
    """What a place is expected to bring, were all requests of the batch to draft so.

    `rate`: tokens a second of the batch. `worth`: the same over the rest of the request, with what it takes
    until its drafter has read its text. Both hold `correction`, what was seen over what was predicted.
    `tokens_per_step` of one request. `is_seen`: at about this load.
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
