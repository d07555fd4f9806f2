"""Bases of drafters that read the target's hidden states: of all tokens (as KV) or of the last one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from speculation.drafter import ComputedRows, Drafter, HiddenRows

_ENOUGH_CONTEXT = 64
"""Tokens of context with which a draft is about as good as with a whole text."""
MOST_UNREAD = 32
"""The most tokens of a request whose hidden states wait for a draft; each keeps its whole step's alive."""


@dataclass(slots=True, eq=False)
class DraftedKv:
    """A request's draft KV, at the places from `first` to `written` (exclusive). `features` are the hidden
    states for the next places, in pieces.
    """

    first: int
    written: int
    features: list[HiddenRows] = field(default_factory=list)
    carried: Tensor | None = None
    """The hidden states of further heads at place `written`, [heads, hidden_size]; None if unknown."""

    @property
    def end(self) -> int:
        """The first place without draft KV or hidden states."""
        return self.written + sum(map(len, self.features))

    @property
    def is_blind(self) -> bool:
        """Whether drafts see little more than the newest tokens of a longer text."""
        return self.first > 1 and self.end - self.first < _ENOUGH_CONTEXT

    def begin(self, place: int) -> None:
        """Restart at `place`: nothing before it is known."""
        self.first = self.written = place
        self.features, self.carried = [], None


class DraftKvDrafter(Drafter):
    """A drafter with KV made from the target's hidden states: the KV of a place from the state `shift` places
    before, so the first `shift` places have none. Subclasses set `_sampler`, which forgets requests, too.
    """

    shift: int
    _sampler: Sampler

    def __init__(self) -> None:
        self._known: dict[str, DraftedKv] = {}

    @abstractmethod
    def _write(self, waiting: Mapping[SequenceState, DraftedKv]) -> None:
        """Write the KV of all known places whose tokens' own KV the target has computed."""

    def observe(self, computed: Sequence[ComputedRows]) -> None:
        waiting: dict[SequenceState, DraftedKv] = {}
        is_due = False
        for each in computed:
            assert each.hidden is not None
            sequence, end = each.sequence, each.start + each.num_tokens
            known, first = self._known[sequence.request_id], each.start + self.shift
            if known.end != first:  # some steps were not observed
                known.begin(first)
                waiting.pop(sequence, None)
            known.features.append(each.hidden)
            if known.written < end:
                waiting[sequence] = known
                # A prompt's draft KV moves with its blocks. Generated tokens are read by the next draft.
                is_due |= each.start < len(sequence.prompt_token_ids) or end - known.written >= MOST_UNREAD
        if is_due and waiting:  # all of them at once, so that this is rare
            with torch.inference_mode():
                self._write(waiting)

    def num_drafted(self, request_id: str) -> int:
        known = self._known.get(request_id)
        return known.written if known is not None and known.first == self.shift else 0

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self._sampler.forget(request_id)


class LastStateDrafter(Drafter):
    """A drafter that reads the last computed token's hidden state only. Subclasses set `_sampler`."""

    _sampler: Sampler

    def __init__(self) -> None:
        self._features: dict[str, tuple[int, HiddenRows]] = {}
        """The newest hidden state and its token's place, by request id."""

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        """Begin a sequence. Without a `feature`, nothing is drafted until its next step is over."""
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
        """Return drafts of at most `rooms[i]` tokens for sequences whose last hidden state is known."""

    def _is_fresh(self, sequence: SequenceState) -> bool:
        """Return whether the hidden state of the second-to-last token is known."""
        known = self._features.get(sequence.request_id)
        return known is not None and known[0] == len(sequence.token_ids) - 2

    def _last_states(self, sequences: Sequence[SequenceState]) -> Tensor:
        """Return the last hidden states [sequences, hidden_size]."""
        return torch.cat([self._features[sequence.request_id][1].cut() for sequence in sequences])

    def observe(self, computed: Sequence[ComputedRows]) -> None:
        for each in computed:
            assert each.hidden is not None
            place = each.start + each.num_tokens - 1
            self._features[each.sequence.request_id] = place, each.hidden.newest()

    def forget(self, request_id: str) -> None:
        self._features.pop(request_id, None)
        self._sampler.forget(request_id)
