"""What a token costs: the price of the workers' time over the tokens that they make in it.

    cost of a million tokens = price of a worker-hour x workers / 3600 s / (tokens a second) x 1,000,000

Tokens a second are those that count for the buyer: of requests within the SLO, at the highest rate that keeps
it. A decode worker's limit follows from its steps: with B requests that attend to L tokens each, a step takes

    step_s + row_s x B + context_s x B x L        (`protocol.costs.StepCosts`)

and makes B tokens, or `tokens_per_row` times as many where drafts are accepted. Prompts take
`token_s + attention_s x length / 2` for each of their tokens.
"""

from __future__ import annotations

from math import inf

from protocol.costs import StepCosts

MILLION = 1_000_000


def cost_per_million(price: float, workers: int, tokens_per_s: float) -> float:
    """Of a million tokens, in the currency of `price`, which is that of a worker for an hour."""
    return price * workers / 3600 / tokens_per_s * MILLION if tokens_per_s > 0 else inf


def decode_tokens_per_s(costs: StepCosts, rows: float, context: float) -> float:
    """Of one worker that decodes so many requests, each of which attends to `context` tokens."""
    return rows * costs.tokens_per_row / costs.decode_s(rows, rows * context)


def prefill_tokens_per_s(costs: StepCosts, length: int) -> float:
    """Prompt tokens of one worker that computes prompts of this length."""
    return length / costs.chunks_s(length, 0, costs.chunk_tokens)


def cost_of_request(costs: StepCosts, price: float, prompt: int, output: int, rows: float) -> float:
    """What a request's share of busy workers costs, prefill and decode, in batches of `rows`."""
    prefill_s = prompt / prefill_tokens_per_s(costs, prompt)
    decode_s = output / decode_tokens_per_s(costs, rows, prompt + output / 2)
    return price / 3600 * (prefill_s + decode_s)
