"""The results that the sampler's kernels leave on the device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Chosen(NamedTuple):
    """Rows' tokens, and from what the probabilities of these and of all others are computed."""

    tokens: Tensor
    """int64 [n], -1 where no token has a finite score."""
    logits: Tensor
    """[n, vocab], with all edits; tokens lie one behind the other."""
    numbers: Tensor
    """float64 [3, n], of which the first are temperatures, 0 for greedy rows."""
    scales: Tensor
    """float64 [n, 3], if a row is not greedy: its greatest logit; the least that may be chosen and what all
    of these weigh, of logits less the greatest and divided by the temperature.
    """
    arrivals: Tensor
    """int32 [n], zeros: in it a kernel counts a row's programs, so that the last one concludes."""
