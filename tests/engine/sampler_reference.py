"""The sampler's definition, written plainly: one row at a time, noise for every token, no shortcuts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.sampler import SamplingRow, gumbel_noise, stream_keys
from protocol.sampling import SamplingParams


def make_row(request_id: str = "r", prompt=(1, 2, 3), output=(), **params) -> SamplingRow:
    params.setdefault("max_tokens", 10_000)
    return SamplingRow(
        SamplingParams(**params), list(prompt), list(output), len(prompt) + len(output), request_id
    )


def processed(logits: Tensor, row: SamplingRow, eos_token_ids: list[int]) -> Tensor:
    """Return float32 [vocab] after everything that precedes the temperature."""
    params, values = row.params, logits.float().clone()
    for token, bias in params.logit_bias.items():
        values[token] += bias
    if params.allowed_token_ids is not None:
        kept = torch.full_like(values, -math.inf)
        kept[params.allowed_token_ids] = values[params.allowed_token_ids]
        values = kept
    output = row.history
    history = row.prompt_token_ids + output
    for sequence in params.banned_token_sequences:
        if history[len(history) - len(sequence) + 1 :] == sequence[:-1]:
            values[sequence[-1]] = -math.inf
    if len(output) < params.min_tokens:
        values[params.stop_token_ids] = -math.inf
        if not params.ignore_eos:
            values[eos_token_ids] = -math.inf
    for token in set(history):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(output):
        count = output.count(token)
        values[token] -= params.frequency_penalty * count + params.presence_penalty
    return values


def distribution(logits: Tensor, row: SamplingRow, eos_token_ids: list[int] | None = None) -> Tensor:
    """Return float64 [vocab], the exact probabilities of the token."""
    values = scaled(processed(logits, row, eos_token_ids or []), row.params).double()
    probabilities = values.softmax(0)
    return probabilities / probabilities.sum()


def scaled(values: Tensor, params: SamplingParams) -> Tensor:
    """Return float32 [vocab] with maximum 0, after temperature and filters; filtered tokens have -inf."""
    values = values - values.max()
    if params.is_greedy:
        return torch.where(values == 0, 0.0, -math.inf)
    values = values / params.temperature
    if params.min_p > 0:
        values = values.masked_fill(values < math.log(params.min_p), -math.inf)
    if 0 < params.top_k < len(values):
        kth = values.sort(descending=True).values[params.top_k - 1]
        values = values.masked_fill(values < kth, -math.inf)
    if params.top_p < 1:
        distinct, index = values.unique(return_inverse=True)
        mass = torch.zeros(len(distinct), dtype=torch.float64)
        mass.index_add_(0, index, values.double().softmax(0))
        mass_above = mass.flip(0).cumsum(0).flip(0) - mass
        values = values.masked_fill(mass_above[index] >= params.top_p, -math.inf)
    return values


def reference_sample(logits: Tensor, row: SamplingRow, eos_token_ids: list[int]) -> int:
    values = scaled(processed(logits, row, eos_token_ids), row.params)
    if row.params.is_greedy:
        return int(values.argmax())
    key = stream_keys(torch.tensor([row.params.seed]), torch.tensor([row.position]))
    return int((values + gumbel_noise(key, torch.arange(len(values)))).argmax())
