"""The cost of a token: the price of the workers' time divided by the tokens made in this time.

    cost of a million tokens = price of a worker-hour x workers / 3600 s / (tokens a second) x 1,000,000

Only tokens of requests within the SLO count, at the highest rate that keeps it.
"""

from __future__ import annotations

from math import inf

MILLION = 1_000_000


def cost_per_million(price: float, workers: int, tokens_per_s: float) -> float:
    """Return the cost of a million tokens, in the currency of `price`, the price of a worker-hour."""
    return price * workers / 3600 / tokens_per_s * MILLION if tokens_per_s > 0 else inf
