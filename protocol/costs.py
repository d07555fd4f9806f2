"""The measured costs of a worker's steps. Workers fit the weights, the router predicts with them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.ids import Count

Coefficient = Annotated[float, Meta(ge=0)]
SLO_SHARE = 0.8
"""Share of an SLO that a step may take, because some steps take longer than predicted."""
_ANY = 2**31
"""More tokens than any prompt has."""


class StepCosts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A linear model of a worker's step. Its time is the sum of these weights times their counts.

    `step_s` counts once, `row_s` per decoding sequence, `context_s` per token that decoding sequences attend
    to; `chunk_s` once if the step has a prefill chunk, `token_s` per token of the chunk, `attention_s` per
    pair of a chunk's token and an earlier token. A step computes at most `chunk_tokens` prompt tokens, and a
    decoding sequence gets `tokens_per_row` tokens on average. `error` is the mean relative error of the
    latest predictions. A token's KV takes `kv_bytes`, spread evenly over the block tables. `kv_windows` has
    an entry per table: the number of latest tokens whose KV the table keeps, 0 for all. `itl_budget_s` bounds
    the prefill chunks of steps that also decode; 0: no bound.

    All weights are for the worker's own cores. On c times as many, with cores lent by idle workers, decoding
    takes c ** -`decode_scaling` times as long, and prefill c ** -`prefill_scaling`; 0: it borrows none.

    The defaults are a small model's on one core, for a worker that has not reported yet.
    """

    step_s: Coefficient = 2e-3
    row_s: Coefficient = 2e-4
    context_s: Coefficient = 2e-7
    chunk_s: Coefficient = 0.0
    token_s: Coefficient = 1e-4
    attention_s: Coefficient = 2e-8
    chunk_tokens: Count = 512
    tokens_per_row: Annotated[float, Meta(ge=1)] = 1.0
    error: Coefficient = 0.0
    kv_bytes: Count = 0
    kv_windows: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=16)] = (0,)
    itl_budget_s: Coefficient = 0.0
    decode_scaling: Coefficient = 0.0
    prefill_scaling: Coefficient = 0.0

    def kept_tokens(self, num_tokens: float, sequences: float = 1) -> float:
        """Return how many tokens' KV is kept for `sequences` sequences with `num_tokens` tokens in total."""
        kept = [min(num_tokens, window * sequences) if window else num_tokens for window in self.kv_windows]
        return sum(kept) / len(kept)

    def room_tokens(self, num_blocks: int, block_size: int) -> int:
        """Return the number of tokens whose KV fits in a pool of this size."""
        return num_blocks * block_size // len(self.kv_windows)

    @property
    def borrows(self) -> bool:
        return self.decode_scaling > 0 or self.prefill_scaling > 0

    def on(self, spread: float) -> StepCosts:
        """Return the costs on `spread` times the worker's own cores."""
        if spread <= 1 or not self.borrows:
            return self
        decode, prefill = spread**-self.decode_scaling, spread**-self.prefill_scaling
        return msgspec.structs.replace(
            self,
            step_s=self.step_s * decode,
            row_s=self.row_s * decode,
            context_s=self.context_s * decode,
            chunk_s=self.chunk_s * prefill,
            token_s=self.token_s * prefill,
            attention_s=self.attention_s * prefill,
        )

    def decode_s(self, rows: float, context: float) -> float:
        """Return the seconds of a step of `rows` sequences that attend to `context` tokens in total."""
        return self.step_s + self.row_s * rows + self.context_s * context

    def chunks_s(self, tokens: float, before: float, chunk_tokens: float) -> float:
        """Return the seconds that `tokens` of a prompt, after `before` tokens, add to their steps."""
        chunks = -(-tokens // max(chunk_tokens, 1))
        return chunks * self.chunk_s + tokens * (self.token_s + self.attention_s * (before + tokens / 2))

    def prompt_s(
        self, tokens: float, before: float, chunk_tokens: float, rows: float = 0, context: float = 0
    ) -> float:
        """Return the seconds of a prompt's `tokens` after `before` tokens, in steps that decode `rows`."""
        tokens, chunk = max(tokens, 1), max(chunk_tokens, 1)
        return -(-tokens // chunk) * self.decode_s(rows, context) + self.chunks_s(tokens, before, chunk)

    def chunk_seconds(self, rows: float, context: float, itl_budget_s: float) -> float:
        """Return the seconds that a prefill chunk may add to a decode step: the rest of the budget. If
        decoding takes more than half of the budget, return the decoding time, so that prompts still make
        progress.
        """
        decode_s = self.decode_s(rows, context)
        return max(itl_budget_s - decode_s, decode_s)

    def fitting_tokens(self, seconds: float, before: float) -> int:
        """Return how many tokens of a prompt, after `before` tokens, add at most `seconds` to a step."""
        left = seconds - self.chunk_s
        linear, square = self.token_s + self.attention_s * before, self.attention_s / 2
        if left <= 0:
            return 0
        steepness = linear + max(linear * linear + 4 * square * left, 0.0) ** 0.5
        count = 2 * left / steepness if steepness > 0 else _ANY
        return int(count) if count < _ANY else _ANY


def itl_bound(itl_budget_s: float, slo_tpot_s: float) -> float:
    """Return the bound in seconds on a step with a prefill chunk and decoding; 0: no bound.

    The bound is at most `SLO_SHARE` of the SLO, so that requests meet it even if all their steps are full.
    """
    return min(itl_budget_s, SLO_SHARE * slo_tpot_s)


UNKNOWN_COSTS = StepCosts()
