"""The choice of draft tokens from logits: drawn for chains, the likeliest ones for trees.

Tokens are drawn with the noise of the target's own tokens, or with other noise. Coupled verification compares
a draft with the target's token at the same position, so with shared noise both agree wherever the models do.
Rejection sampling needs drafts drawn with noise that decides nothing else, and their true distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.copies import Upload
from engine.sampler import Sampler, SamplingRow
from engine.sampler.noise import gumbel_noise, stream_keys
from engine.step.draft import Draft, LateTokens
from engine.step.sequence import SequenceState
from protocol.sampling import SamplingParams
from protocol.speculation import Verification


def in_whole_vocabulary(logits: Tensor, draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits [rows, vocab_size] of the target's vocabulary from logits of the draft's."""
    if draft_ids is None:
        return logits[:, :vocab_size]
    whole = logits.new_full((len(logits), vocab_size), -torch.inf)
    whole[:, draft_ids] = logits
    return whole


class DrawnTokens(NamedTuple):
    """Tokens on the logits' device, int64 [n], negative if none could be chosen, and their `distributions`,
    float32 [n, vocab_size]; None if all are greedy or use the target's noise.
    """

    token_ids: Tensor
    distributions: Tensor | None


class Drawing:
    """The draws of one drafter's tokens, with a `sampler` of its own, which must `forget` requests, too."""

    def __init__(self, sampler: Sampler, verification: Verification, draft_ids: Tensor | None = None) -> None:
        self._sampler, self._draft_ids = sampler, draft_ids
        self._shares_noise = verification == "coupled"

    def draw(
        self, sequences: Sequence[SequenceState], logits: Tensor, drafted: Sequence[Sequence[int]]
    ) -> DrawnTokens:
        """Draw a token for each sequence from the draft's `logits` [sequences, tokens] after the tokens
        `drafted` so far. For sequences that need no history only the number of these tokens matters.
        """
        rows = [sequence.sampling_row(its) for sequence, its in zip(sequences, drafted, strict=True)]
        return self._choose(sequences, rows, logits)

    def draft_at_once(
        self, sequences: Sequence[SequenceState], rooms: Sequence[int], logits: Tensor
    ) -> list[Draft]:
        """Draft up to `rooms[i]` tokens each from `logits` [sequences, count, tokens], without a wait."""
        count = logits.shape[1]
        owners = [sequence for sequence in sequences for _ in range(count)]
        rows = [owner.sampling_row() for owner in owners]
        for number, row in enumerate(rows):
            row.position += number % count
        drawn = self._choose(owners, rows, logits.flatten(0, 1))
        late, drafts = LateTokens(drawn.token_ids.clamp_min(0), self._sampler.download), []
        for number, (sequence, room) in enumerate(zip(sequences, rooms, strict=True)):
            places = range(number * count, number * count + min(room, count))
            draft = Draft([~place for place in places], late=late)
            if drawn.distributions is not None and not sequence.params.is_greedy:
                draft.distributions = drawn.distributions[places.start : places.stop]
            drafts.append(draft)
        return drafts

    def _choose(
        self, sequences: Sequence[SequenceState], rows: list[SamplingRow], logits: Tensor
    ) -> DrawnTokens:
        logits = in_whole_vocabulary(logits, self._draft_ids, self._sampler.vocab_size)
        if self._shares_noise or all(row.params.is_greedy for row in rows):
            return DrawnTokens(self._sampler.tokens(logits, rows), None)
        starts = [sequence.position for sequence in sequences]
        return DrawnTokens(*self._sampler.draw_drafts(logits, rows, starts))


_NUM_CANDIDATES = 64
"""Candidate tokens of a row; the target's token is almost always among them."""

_DISAGREEMENT = 0.5
"""The difference between the logits of drafter and target, as a scale of Gumbel noise: of scales from 1/3 to
1, it brought the most accepted tokens (bundled pair).
"""

NEAR = math.log(0.3)
"""The least log-probability of a path that is followed, relative to its level's likeliest: of ratios from
0.02 to 0.6, this one brought the most accepted tokens (bundled pair, 8 to 24 nodes).
"""

_MIN_TEMPERATURE = 1e-6


def rank(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    upload: Upload,
    *,
    with_noise: bool,
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities, float32 [rows, n], that tokens, int64 [rows, n], are the target's at
    `positions`.

    `logits` [rows, vocab_size] are the drafter's, without penalties and bans. `with_noise`: the target draws
    with the noise of the position (coupled verification), so the tokens that it favours are known. The target
    then takes the greatest sum of its logit and noise, as a greedy row takes the greatest logit, and only the
    difference between the models' logits is left to chance. `upload` is to the logits' device; the host does
    not wait for it.
    """
    num_tokens = min(_NUM_CANDIDATES, logits.shape[1])
    is_greedy, seeds, places, options = upload(
        [
            np.array([[p.is_greedy] for p in params]),
            np.array([p.seed for p in params], np.int64),
            np.array(positions, np.int64),
            np.array([_options(p, num_tokens) for p in params], np.float32),
        ]
    )
    temperatures, *filters = options.T.unsqueeze(2)
    log_probs = (logits.float() / temperatures).log_softmax(1)
    scores, token_ids = log_probs.topk(num_tokens)
    if with_noise and not all(p.is_greedy for p in params):
        keys = stream_keys(seeds, places)
        noise = gumbel_noise(keys.unsqueeze(1), token_ids).masked_fill_(is_greedy, 0.0)
        scores = (scores + noise).masked_fill_(~_admitted(scores, *filters), -torch.inf)
    sharpness = torch.where(is_greedy | with_noise, temperatures / _DISAGREEMENT, 1.0)
    return (scores * sharpness).log_softmax(1), token_ids


def best_of(scores: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the scores of each row's `count` likeliest tokens, and the tokens; the likeliest first."""
    best = scores.topk(min(count, scores.shape[1]))
    return best.values, token_ids.gather(1, best.indices)


def _options(params: SamplingParams, num_tokens: int) -> tuple[float, int, float, float]:
    """Return temperature, top-k, top-p and min-p for `num_tokens` candidates."""
    if params.is_greedy:
        return 1.0, num_tokens, 1.0, 0.0
    top_k = params.top_k if params.top_k > 0 else num_tokens
    return max(params.temperature, _MIN_TEMPERATURE), top_k, params.top_p, params.min_p


def _admitted(values: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return which log-probabilities (descending) pass the filters [rows, 1]: bool [rows, n]."""
    mass = values.exp()
    ranks = torch.arange(values.shape[1], device=values.device)
    return (ranks < top_k) & (mass.cumsum(1) - mass < top_p) & (mass >= min_p * mass[:, :1])
