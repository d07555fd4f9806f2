"""How drafters choose tokens by their logits: drawn ones for chains, and the likeliest ones for trees.

Stochastic drafters draw with the noise of the target's own tokens, or with noise of their own.

Coupled verification compares a draft with the target's token at the same position, so sharing its noise
makes the two agree wherever the models do. Rejection sampling needs drafts that no other noise determines,
and the distribution that each was really drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.copies import Downloader, Upload
from engine.sampler import Sampler, SamplingRow
from engine.sampler.noise import gumbel_noise, stream_keys
from engine.step.draft import Draft
from engine.step.late_tokens import LateTokens
from engine.step.sequence import SequenceState
from protocol.sampling import SamplingParams
from protocol.speculation import Verification


def in_whole_vocabulary(logits: Tensor, draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Return logits [rows, vocab_size] of the target's tokens, from those of the draft's."""
    if draft_ids is None:
        return logits[:, :vocab_size]
    whole = logits.new_full((len(logits), vocab_size), -torch.inf)
    whole[:, draft_ids] = logits
    return whole


class Drawn(NamedTuple):
    """Tokens on the logits' device, int64 [n], negative where none could be chosen. `distributions`, float32
    [n, vocab_size], unless all are chosen with the target's noise.
    """

    token_ids: Tensor
    distributions: Tensor | None


class Drawing:
    """Draws the tokens of one drafter. `sampler` is the drafter's own, which must `forget` requests there."""

    def __init__(self, sampler: Sampler, verification: Verification) -> None:
        self._sampler = sampler
        self._shares_noise = verification == "coupled"
        self._download = Downloader(sampler.device)

    def draw(
        self, sequences: Sequence[SequenceState], logits: Tensor, drafted: Sequence[Sequence[int]]
    ) -> Drawn:
        """Draw a token for each sequence, by the draft's `logits` [sequences, vocab_size] after the tokens
        drafted so far. For sequences that do not need their history the number of these is enough.
        """
        rows = [sequence.sampling_row(its) for sequence, its in zip(sequences, drafted, strict=True)]
        return self._choose(sequences, rows, logits)

    def draft_at_once(
        self, sequences: Sequence[SequenceState], rooms: Sequence[int], logits: Tensor
    ) -> list[Draft]:
        """Draft up to `rooms[i]` tokens for each sequence, by `logits` [sequences, count, vocab_size] that do
        not depend on the tokens before. The host does not wait for the tokens.
        """
        count = logits.shape[1]
        owners = [sequence for sequence in sequences for _ in range(count)]
        rows = [owner.sampling_row() for owner in owners]
        for number, row in enumerate(rows):
            row.position += number % count
        drawn = self._choose(owners, rows, logits.flatten(0, 1))
        late, drafts = LateTokens(drawn.token_ids.clamp_min(0), self._download), []
        for number, (sequence, room) in enumerate(zip(sequences, rooms, strict=True)):
            places = range(number * count, number * count + min(room, count))
            draft = Draft([~place for place in places], late=late)
            if drawn.distributions is not None and not sequence.params.is_greedy:
                draft.distributions = drawn.distributions[places.start : places.stop]
            drafts.append(draft)
        return drafts

    def _choose(self, sequences: Sequence[SequenceState], rows: list[SamplingRow], logits: Tensor) -> Drawn:
        if self._shares_noise or all(row.params.is_greedy for row in rows):
            return Drawn(self._sampler.tokens(logits, rows), None)
        starts = [sequence.position for sequence in sequences]
        return Drawn(*self._sampler.draw_drafts(logits, rows, starts))


_NUM_CANDIDATES = 64
"""Tokens of a row that are looked at: the others together are hardly ever the one."""

_DISAGREEMENT = 0.5
"""How much the logits of drafter and target differ, as the scale of Gumbel noise: of 1/3 to 1 this brought
the most accepted tokens (bundled pair)."""

NEAR = math.log(0.3)
"""Paths of a tree this much less likely than their level's likeliest are not followed: of 0.02 to 0.6 times
as likely, this brought the most accepted tokens (bundled pair, 8 to 24 nodes)."""

_MIN_TEMPERATURE = 1e-6


def rank(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    upload: Upload,
    *,
    with_noise: bool,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities, float32 [rows, n], of tokens, int64 [rows, n], being the target's at
    `positions`.

    `logits` [rows, vocab_size] are the drafter's; penalties and bans are left out. `with_noise`: the target
    draws with the noise of the position (coupled verification), so that it is known which tokens that
    favours. What it will take is then the greatest sum of its logits and noise, as it is for greedy rows
    without noise, and only the difference between the two models' logits is left to chance. `upload` is to
    the logits' device, for which the host does not wait.
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
    """Return bool [rows, n]: which log-probabilities, in descending order, the filters [rows, 1] leave."""
    mass = values.exp()
    ranks = torch.arange(values.shape[1], device=values.device)
    return (ranks < top_k) & (mass.cumsum(1) - mass < top_p) & (mass >= min_p * mass[:, :1])
