"""A request as the controller sees it, and how many tokens its method can draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from costs.acceptance import RequestAcceptance
from protocol.speculation import METHODS, Source, SpeculativeConfig

Origin = Literal["computed", "prefix_hit", "handed_over"]
"""The source of a prompt's KV: all computed here, partly from the prefix cache, or from another worker."""


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


def draft_shape(method: Source, options: SpeculativeConfig) -> Shape:
    """Return the numbers of tokens that the controller can choose from for a request of this method."""
    if method == "lookahead":
        return Shape(options.lookahead_rows, whole=True)
    if options.tree and method == options.method:
        return Shape(options.tree_nodes, whole=True)
    return Shape(options.max_speculative_tokens)


def default_drafted(options: SpeculativeConfig) -> int:
    """Return the most tokens that a request drafts which asks for no number of its own."""
    fixed = options.fixed_tokens
    return draft_shape(options.method, options).max_tokens if fixed is None else fixed


def most_drafted(options: SpeculativeConfig) -> int:
    """Return the most tokens of a request's draft, by any method that it may ask for."""
    return max(draft_shape(method, options).max_tokens for method in METHODS)
