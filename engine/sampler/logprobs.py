"""Log-probabilities under the model itself: log-softmax of the raw logits, before any processing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.copies import Upload
from protocol.outputs import TokenLogprobs

_MIN_LOGPROB = -9999.0
_MAX_ELEMENTS = 2**24


def token_logprobs(
    logits: Tensor,
    token_ids: Sequence[int],
    num_top: Sequence[int],
    upload: Upload,
    download: Callable[[Tensor], Tensor],
) -> list[TokenLogprobs]:
    """Return for each row of `logits` [n, vocab] the given token's log-probability and rank, and the
    likeliest tokens. Among equal logits the lower token id comes first.

    Log-probabilities are at least -9999, which JSON can express; in a row with NaN all are -9999.
    """
    chunk = max(1, _MAX_ELEMENTS // logits.shape[1])
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), chunk):
        rows = slice(start, start + chunk)
        (tokens,) = upload([np.array(token_ids[rows], np.int64)])
        found = _found(logits[rows], tokens, max(num_top[rows]))
        if logits.device.type != "cpu":
            found = _together(found, download)
        entries.extend(_entries(found, num_top[rows]))
    return entries


Found = tuple[Tensor, Tensor, Tensor, Tensor]
"""[n, 1]: log-probability and rank; [n, count]: the likeliest tokens and their log-probabilities."""


def _found(logits: Tensor, token_ids: Tensor, num_top: int) -> Found:
    token_ids, values = token_ids.unsqueeze(1), logits.float().contiguous()
    log_probs = values.log_softmax(dim=1)  # `logsumexp` would split a lone row between threads
    unusable = log_probs[:, :1].isnan()
    if values.device.type != "cpu" or unusable.any():
        values = values.masked_fill(unusable, -torch.inf)
    ranks = (values > values.gather(1, token_ids)).sum(dim=1, keepdim=True) + 1
    top = (_top if values.device.type == "cpu" else _top_without_wait)(values, num_top)
    both = (log_probs.gather(1, ids).masked_fill_(unusable, -torch.inf) for ids in (token_ids, top))
    own, likeliest = (each.clamp_min_(_MIN_LOGPROB) for each in both)
    return own, ranks, top, likeliest


def _together(found: Found, download: Callable[[Tensor], Tensor]) -> Found:
    """Download all parts in one copy, as float64, which holds each value exactly."""
    widths = [each.shape[1] for each in found]
    own, ranks, top, likeliest = download(torch.cat([each.double() for each in found], dim=1)).split(
        widths, 1
    )
    return own, ranks.long(), top.long(), likeliest


def _entries(found: Found, num_top: Sequence[int]) -> list[TokenLogprobs]:
    own, ranks, top, likeliest = (each.tolist() for each in found)
    return [
        TokenLogprobs(own[row][0], ranks[row][0], top[row][:count], likeliest[row][:count])
        for row, count in enumerate(num_top)
    ]


def _top(values: Tensor, count: int) -> Tensor:
    """Return the ids of each row's greatest values, greatest first, the lower id first among equals.

    `topk` alone does not define which of several equal values it returns at the boundary.
    """
    count = min(count, values.shape[1])
    if count == 0:
        return torch.empty(len(values), 0, dtype=torch.int64)
    floor = values.topk(count).values[:, -1:]
    rows, token_ids = (values >= floor).nonzero(as_tuple=True)
    by_value = values[rows, token_ids].argsort(descending=True, stable=True)
    order = by_value[rows[by_value].argsort(stable=True)]
    starts = torch.searchsorted(rows, torch.arange(len(values)))
    return token_ids[order[starts.unsqueeze(1) + torch.arange(count)]]


def _top_without_wait(values: Tensor, count: int) -> Tensor:
    """Return the ids like `_top`, by integer keys of value and id. No shape depends on values."""
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    token_ids = torch.arange(values.shape[1], device=values.device)
    keys = (ordered.long() << 32) - token_ids
    return keys.topk(min(count, values.shape[1])).indices
