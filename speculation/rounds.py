"""The noise of speculative rounds. A sequence's round begins at its first token that is not committed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampler import Purpose, round_keys
from engine.sequence import SequenceState


def noise_keys(
    sequences: Sequence[SequenceState], positions: Sequence[int], purpose: Purpose, device: torch.device
) -> Tensor:
    """int64 [n]: for the noise at a position of each sequence's present round."""
    seeds = [sequence.params.seed for sequence in sequences]
    starts = [sequence.position for sequence in sequences]
    columns = torch.tensor([seeds, starts, list(positions)], dtype=torch.int64, device=device)
    return round_keys(columns[0], columns[1], columns[2], purpose)
