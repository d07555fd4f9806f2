"""A custom drafter: it drafts the token that followed the last token earlier in the request.

    PYTHONPATH=. tandem serve \\
        --speculative-config '{"method": "custom", "drafter": "examples.custom_drafter:LastFollower"}'

`speculation.drafter.Drafter` describes each method and when it is called. A wrong draft costs time, and never
changes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from engine.devices.loaded_model import LoadedModel
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig
from speculation.drafter import ComputedRows, Drafter


class LastFollower(Drafter):
    def __init__(self, options: SpeculativeConfig, config: ServeConfig, loaded: LoadedModel) -> None:
        self._followers: dict[str, dict[int, int]] = {}

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        self._followers[sequence.request_id] = dict(pairwise(sequence.token_ids))

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        return [self._draft(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]

    def observe(self, computed: Sequence[ComputedRows]) -> None:
        for each in computed:
            newest = each.sequence.token_ids[-each.num_tokens - 1 :]
            self._followers[each.sequence.request_id].update(pairwise(newest))

    def forget(self, request_id: str) -> None:
        self._followers.pop(request_id, None)

    def _draft(self, sequence: SequenceState, count: int) -> Draft | None:
        followers, drafted = self._followers[sequence.request_id], [sequence.token_ids[-1]]
        while len(drafted) <= count and drafted[-1] in followers:
            drafted.append(followers[drafted[-1]])
        return Draft(drafted[1:]) if len(drafted) > 1 else None
