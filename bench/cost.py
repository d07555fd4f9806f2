"""The cost of a token: the price of the workers' time divided by the tokens that they make in it.

    cost of a million tokens = price of a worker-hour x workers / 3600 s / (tokens a second) x 1,000,000

Only tokens of requests within the SLO count, at the highest rate that keeps it. A decode worker's limit
follows from its steps: with B requests that attend to L tokens each, a step takes

    step_s + row_s x B + context_s x B x L        (`protocol.costs.StepCosts`)

and makes B tokens, or `tokens_per_row` times as many if drafts are accepted. A prompt takes `token_s +
attention_s x length / 2` for each of its tokens.
"""

from __future__ import annotations

from math import inf

from protocol.costs import StepCosts

MILLION = 1_000_000


def cost_per_million(price: float, workers: int, tokens_per_s: float) -> float:
    """Return the cost of a million tokens, in the currency of `price`, the price of a worker-hour."""
    return price * workers / 3600 / tokens_per_s * MILLION if tokens_per_s > 0 else inf


def decode_tokens_per_s(costs: StepCosts, rows: float, context: float) -> float:
    """Return the tokens per second of one worker that decodes `rows` requests which attend to `context`
    tokens each.
    """
    return rows * costs.tokens_per_row / costs.decode_s(rows, rows * context)


def prefill_tokens_per_s(costs: StepCosts, length: int) -> float:
    """Return the prompt tokens per second of one worker that computes prompts of `length` tokens."""
    return length / costs.chunks_s(length, 0, costs.chunk_tokens)


def cost_of_request(costs: StepCosts, price: float, prompt: int, output: int, rows: float) -> float:
    """Return the cost of a request's share of busy workers, prefill and decode, in batches of `rows`."""
    prefill_s = prompt / prefill_tokens_per_s(costs, prompt)
    decode_s = output / decode_tokens_per_s(costs, rows, prompt + output / 2)
    return price / 3600 * (prefill_s + decode_s)
