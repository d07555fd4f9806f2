"""From logits to tokens, for a whole batch at once.

A row's token is the argmax of its processed log-probabilities plus noise keyed by (seed, position), so it
depends on the row alone. Processing goes, in vLLM's order: logit bias, allowed tokens, bans, `min_tokens`,
penalties, temperature, min-p, top-k, top-p. Greedy rows take the argmax after the penalties. Among equals
the lowest token id wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.sampler.batch import BatchParams
from engine.sampler.edits import apply_edits
from engine.sampler.filters import survivors
from engine.sampler.logprobs import token_logprobs
from engine.sampler.noise import gumbel_noise, stream_keys
from engine.sampler.ops import argmax_rows
from engine.sampler.penalties import Penalties
from engine.sampler.race import challengers
from engine.sampler.rows import SamplingRow
from protocol.messages import TokenLogprobs


@dataclass(slots=True, eq=False)
class SampleOutput:
    """One entry per row. `failed_rows` had no token of finite score (NaN logits, or every token forbidden);
    their tokens mean nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    failed_rows: list[int] = field(default_factory=list)


class Sampler:
    """Samples for one model. Its only state is the penalties' counts, which `forget` drops."""

    def __init__(self, vocab_size: int, device: torch.device | str, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._penalties = Penalties()
        self._batch: BatchParams | None = None

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampleOutput:
        """Choose a token for each row of `logits` [n, vocab], any float dtype, which stay as they are."""
        if not rows:
            return SampleOutput([], [])
        batch = self._batch_for(rows)
        if batch.edits_logits or not batch.all_greedy:
            values = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).copy_(logits)
        else:
            values = logits.float()
        if batch.edits_logits:
            apply_edits(values, rows, batch, self._eos_token_ids)
            if batch.penalty_rows:
                self._penalties.apply(values, rows, batch)
        best = values.amax(dim=1, keepdim=True)
        usable = best.isfinite()
        failed_rows = [] if usable.all() else (~usable).nonzero()[:, 0].tolist()
        if batch.all_greedy:
            chosen = argmax_rows(values)
        else:
            values.sub_(best).div_(batch.temperature)
            values[failed_rows] = 0.0
            chosen = _draw(values, rows, batch)
        token_ids = chosen.tolist()
        return SampleOutput(token_ids, _logprobs(logits, token_ids, batch), failed_rows)

    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt's own tokens: row i of `logits` predicts `next_token_ids[i]`."""
        return token_logprobs(logits, next_token_ids, [num_top] * len(next_token_ids))

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that is over. Unknown ids are ignored."""
        self._penalties.forget(request_id)

    def _batch_for(self, rows: Sequence[SamplingRow]) -> BatchParams:
        params = [row.params for row in rows]
        if self._batch is None or not self._batch.describes(params):
            self._batch = BatchParams(params, self._vocab_size, self._device)
        return self._batch


def _draw(values: Tensor, rows: Sequence[SamplingRow], batch: BatchParams) -> Tensor:
    """Tokens [n] from log-probabilities with each row's maximum at 0. Overwrites `values`."""
    positions = torch.tensor([row.position for row in rows], dtype=torch.int64, device=values.device)
    keys = stream_keys(batch.seeds, positions)
    candidate_rows, token_ids = _candidates(values, keys, batch)
    noise = gumbel_noise(keys[candidate_rows], token_ids)
    if batch.greedy_rows:
        noise *= batch.noise_scale[candidate_rows]
    scores = values[candidate_rows, token_ids] + noise
    values.fill_(-torch.inf)
    values[candidate_rows, token_ids] = scores
    return argmax_rows(values)


def _candidates(values: Tensor, keys: Tensor, batch: BatchParams) -> tuple[Tensor, Tensor]:
    """Rows and token ids of all tokens that may win, whose noise is worth computing."""
    if batch.all_open:
        return challengers(values, keys)
    rows, token_ids = survivors(values, batch)
    if len(batch.open_rows):
        open_index, open_ids = challengers(values[batch.open_rows], keys[batch.open_rows])
        rows = torch.cat([rows, batch.open_rows[open_index]])
        token_ids = torch.cat([token_ids, open_ids])
    return rows, token_ids


def _logprobs(logits: Tensor, token_ids: list[int], batch: BatchParams) -> list[TokenLogprobs | None]:
    entries: list[TokenLogprobs | None] = [None] * len(token_ids)
    wanted = batch.logprob_rows
    if wanted:
        num_top = [batch.params[row].logprobs or 0 for row in wanted]
        selected = logits if len(wanted) == len(token_ids) else logits[wanted]
        found = token_logprobs(selected, [token_ids[row] for row in wanted], num_top)
        for row, entry in zip(wanted, found, strict=True):
            entries[row] = entry
    return entries
