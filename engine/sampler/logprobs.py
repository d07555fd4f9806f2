"""Log-probabilities under the model itself: log-softmax of the raw logits, before any processing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.outputs import TokenLogprobs

_MIN_LOGPROB = -9999.0
_MAX_ELEMENTS = 2**24


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """One entry per row of `logits` [n, vocab]: the given token's log-probability and rank, the likeliest.

    Among equals the lower token id comes first. Values are at least -9999, which JSON can
    express; those of a row with NaN are all -9999.
    """
    chunk = max(1, _MAX_ELEMENTS // logits.shape[1])
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), chunk):
        rows = slice(start, start + chunk)
        entries.extend(_chunk_logprobs(logits[rows], token_ids[rows], num_top[rows]))
    return entries


def _chunk_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    values = logits.float().contiguous()
    normalizer = values.logsumexp(dim=1, keepdim=True)
    unusable = ~normalizer.isfinite()
    if unusable.any():
        values = values.masked_fill(unusable, -torch.inf)
        normalizer = normalizer.masked_fill(unusable, 0.0)
    chosen = values.gather(1, torch.tensor(token_ids, device=values.device).unsqueeze(1))
    ranks = ((values > chosen).sum(dim=1) + 1).tolist()
    own = (chosen - normalizer).clamp_min_(_MIN_LOGPROB).squeeze(1).tolist()
    top_ids, top_values = _top(values, max(num_top))
    top_logprobs = (top_values - normalizer).clamp_min_(_MIN_LOGPROB).tolist()
    return [
        TokenLogprobs(own[row], ranks[row], ids[:count], top_logprobs[row][:count])
        for row, (ids, count) in enumerate(zip(top_ids.tolist(), num_top, strict=True))
    ]


def _top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and values of each row's greatest, best first, the lower id first among equals.

    topk alone leaves open which of several equal values it returns at the boundary.
    """
    count = min(count, values.shape[1])
    if count == 0:
        return torch.empty(len(values), 0, dtype=torch.int64), values[:, :0]
    floor = values.topk(count).values[:, -1:]
    rows, token_ids = (values >= floor).nonzero(as_tuple=True)
    by_value = values[rows, token_ids].argsort(descending=True, stable=True)
    order = by_value[rows[by_value].argsort(stable=True)]
    starts = torch.searchsorted(rows, torch.arange(len(values), device=rows.device))
    best = token_ids[order[starts.unsqueeze(1) + torch.arange(count, device=rows.device)]]
    return best, values.gather(1, best)
