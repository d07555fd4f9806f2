"""Drafters that read nothing of a text but the target's hidden state of its last computed token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from speculation.drafter import Computed, Drafter, HiddenRows


class LastStateDrafter(Drafter):
    """Subclasses set `_sampler`, which forgets requests with it."""

    _sampler: Sampler

    def __init__(self) -> None:
        self._features: dict[str, tuple[int, HiddenRows]] = {}
        """By request: the newest hidden state, and its token's place."""

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        """Without a feature nothing is drafted until the sequence's next step is over."""
        self._features.pop(sequence.request_id, None)
        if feature is not None:
            known = HiddenRows(feature.unsqueeze(0), range(1))
            self._features[sequence.request_id] = sequence.num_computed - 1, known

    def feature(self, request_id: str) -> Tensor | None:
        known = self._features.get(request_id)
        return None if known is None else known[1].cut()[0]

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        drafts: list[Draft | None] = [None] * len(sequences)
        known = [i for i, sequence in enumerate(sequences) if counts[i] > 0 and self._is_fresh(sequence)]
        if known:
            made = self._draft([sequences[i] for i in known], [counts[i] for i in known])
            for i, draft in zip(known, made, strict=True):
                drafts[i] = draft
        return drafts

    @abstractmethod
    def _draft(self, sequences: Sequence[SequenceState], rooms: Sequence[int]) -> Sequence[Draft]:
        """Return drafts of at most so many tokens for sequences whose last hidden state is known."""

    def _is_fresh(self, sequence: SequenceState) -> bool:
        """Whether the hidden state of the last token but one is there."""
        known = self._features.get(sequence.request_id)
        return known is not None and known[0] == len(sequence.token_ids) - 2

    def _last_states(self, sequences: Sequence[SequenceState]) -> Tensor:
        """[sequences, hidden_size]"""
        return torch.cat([self._features[sequence.request_id][1].cut() for sequence in sequences])

    def observe(self, computed: Sequence[Computed]) -> None:
        for each in computed:
            assert each.hidden is not None
            place = each.start + each.num_tokens - 1
            self._features[each.sequence.request_id] = place, each.hidden.newest()

    def forget(self, request_id: str) -> None:
        self._features.pop(request_id, None)
        self._sampler.forget(request_id)
