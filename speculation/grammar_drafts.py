"""Drafts under a grammar: what must follow is drafted for nothing, what may not is not verified."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.sampler import Grammars
from engine.step.draft import Draft
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceState
from engine.step.speculation_interface import MakeRoom
from protocol.speculation import Source
from speculation.account import Account

MAX_FORCED = 16
"""The most tokens of one draft: more of a step's rows at once cost a CPU about what they save."""


class GrammarDrafts:
    def __init__(self, grammars: Grammars, account: Account) -> None:
        self._grammars = grammars
        self._account = account
        self.forced: set[SequenceState] = set()
        """The sequences whose draft in the current step is their grammar's."""

    def draft(self, step: ScheduledStep, sequences: Sequence[SequenceState], make_room: MakeRoom) -> None:
        """Draft the tokens about which grammars leave no choice."""
        started = time.perf_counter()
        for sequence in sequences:
            tokens = self._forced_tokens(sequence)
            if tokens and (room := make_room(step, sequence, len(tokens))):
                sequence.draft = Draft(tokens[:room])
                self.forced.add(sequence)
        self._account.drafted("grammar", time.perf_counter() - started)

    def constrain(self, sequence: SequenceState, draft: Draft, method: Source) -> Draft:
        """The draft without the end that the grammar forbids. Where nothing is left of it, its drafter still
        has to be told that none of its tokens came. What is probed stays, and what is before it.
        """
        if draft.probes:
            return draft
        num_nodes = self._num_allowed(sequence, draft)
        if num_nodes == draft.num_nodes:
            return draft
        self._account.cut(method, draft.num_nodes - num_nodes)
        return draft.first(num_nodes)

    def count(self, step: ScheduledStep) -> None:
        """To drafters these tokens are as if they had come one by one: they know nothing of such drafts."""
        for sequence, outcome in zip(step.sequences, step.outcomes, strict=True):
            if sequence in self.forced and outcome.draft is not None:
                self._account.verified("grammar", outcome.draft.num_nodes, outcome.num_accepted)
                outcome.draft = outcome.verdict = None

    def _forced_tokens(self, sequence: SequenceState) -> list[int]:
        """Tokens that must follow. The model may write the same text in others, so they are drafts."""
        return self._grammars.forced(sequence.sampling_row())[:MAX_FORCED]

    def _num_allowed(self, sequence: SequenceState, draft: Draft) -> int:
        """How many of the draft's nodes come before those of its end that the grammar forbids."""
        row = sequence.sampling_row()
        allowed: set[int] = {-1}
        for node in range(draft.num_nodes):
            if draft.parent(node) in allowed and self._grammars.allows(row, draft.path(node)):
                allowed.add(node)
        return max(allowed) + 1
