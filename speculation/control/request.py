"""A request as the controller sees it, and what its method can draft."""

from __future__ import annotations

from dataclasses import dataclass

from costs.acceptance import RequestAcceptance
from protocol.speculation import Source
from speculation.account import Origin


@dataclass(frozen=True, slots=True)
class Shape:
    """The drafts of a method: chains of up to `max_tokens`; `whole`: so many tokens or none."""

    max_tokens: int
    whole: bool = False

    @property
    def width(self) -> int:
        """The tokens of a slot, which are drafted together or not at all."""
        return self.max_tokens if self.whole else 1


@dataclass(slots=True, eq=False)
class SpeculatingRequest:
    """One request of the batch. Without a `method` it does not speculate; `fixed_tokens` None is "auto".
    It drafts `most` tokens at most, if that is not None.

    `place` is its number of tokens, `unread` those that the drafter must read before it drafts; `is_blind`:
    its prompt was not read, and can't be any more. It drafts `granted` tokens in each step of the present
    plan.
    """

    method: Source | None
    fixed_tokens: int | None
    acceptance: RequestAcceptance
    origin: Origin = "computed"
    place: int = 0
    unread: int = 0
    is_blind: bool = False
    granted: int = 0
    most: int | None = None
