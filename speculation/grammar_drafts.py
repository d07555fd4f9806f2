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
        """Draft the text about which grammars leave no choice. The model may write it in other tokens."""
        started = time.perf_counter()
        for sequence in sequences:
            tokens = self._grammars.forced(sequence.sampling_row())[:MAX_FORCED]
            if tokens and (room := make_room(step, sequence, len(tokens))):
                sequence.draft = Draft(tokens[:room])
                self.forced.add(sequence)
        self._account.drafted("grammar", time.perf_counter() - started)

    def constrain(self, sequence: SequenceState, draft: Draft, method: Source) -> Draft:
        """Return the draft without the end that the grammar forbids. An empty one is a draft, too: its
        drafter has to learn that no token was accepted. Probes stay, and the nodes before them.
        """
        if draft.probes:
            return draft
        num_nodes = self._num_allowed(sequence, draft)
        if num_nodes == draft.num_nodes:
            return draft
        self._account.cut(method, draft.num_nodes - num_nodes)
        return draft.first(num_nodes)

    def count(self, step: ScheduledStep) -> None:
        """Count the grammars' drafts and hide them from drafters, to which the tokens came one by one."""
        for sequence, outcome in zip(step.sequences, step.outcomes, strict=True):
            if sequence in self.forced and outcome.draft is not None:
                self._account.verified("grammar", outcome.draft.num_nodes, outcome.num_accepted)
                outcome.draft = outcome.verdict = None

    def _num_allowed(self, sequence: SequenceState, draft: Draft) -> int:
        """Return the number of nodes before the end that the grammar forbids."""
        row = sequence.sampling_row()
        allowed: set[int] = {-1}
        for node in range(draft.num_nodes):
            if draft.parent(node) in allowed and self._grammars.allows(row, draft.path(node)):
                allowed.add(node)
        return max(allowed) + 1
