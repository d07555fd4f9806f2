"""How much the drafting methods draft."""

from __future__ import annotations

from protocol.speculation import METHODS, Source, SpeculativeConfig
from speculation.control.request import Shape


def draft_shape(method: Source, options: SpeculativeConfig) -> Shape:
    """The numbers of tokens that the controller can choose from for a request of this method."""
    if method == "lookahead":
        return Shape(options.lookahead_rows, whole=True)
    if options.tree and method == options.method:
        return Shape(options.tree_nodes, whole=True)
    return Shape(options.max_speculative_tokens)


def default_drafted(options: SpeculativeConfig) -> int:
    """Tokens that a request which asks for nothing else drafts at most."""
    fixed = options.fixed_tokens
    return draft_shape(options.method, options).max_tokens if fixed is None else fixed


def most_drafted(options: SpeculativeConfig) -> int:
    """Tokens that a request's draft has at most, by whatever method it asks for."""
    return max(draft_shape(method, options).max_tokens for method in METHODS)
