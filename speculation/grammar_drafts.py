"""What a grammar says of drafts: what must follow is drafted for nothing, what may not is not verified."""

from __future__ import annotations

from engine.draft import Draft
from engine.sampler import Grammars
from engine.sequence import SequenceState

MAX_FORCED = 16
"""Of one draft: more of a step's rows at once cost a CPU about what they save."""


def forced_tokens(grammars: Grammars, sequence: SequenceState) -> list[int]:
    """Tokens that must follow. The model may write the same text in others, so they are drafts."""
    return grammars.forced(sequence.sampling_row())[:MAX_FORCED]


def num_allowed(grammars: Grammars, sequence: SequenceState, draft: Draft) -> int:
    """How many of the draft's nodes come before those of its end that the grammar forbids."""
    row = sequence.sampling_row()
    allowed: set[int] = {-1}
    for node in range(draft.num_nodes):
        if draft.parent(node) in allowed and grammars.allows(row, draft.path(node)):
            allowed.add(node)
    return max(allowed) + 1
