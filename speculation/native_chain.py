"""Drafting chains in one native call: what is new is read, a token chosen, run, the next one chosen."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from torch import Tensor

from engine.decoder.forward import NativeDecoder
from engine.rows import RowArrays, SequenceRows
from engine.sampler.rows import edits_logits
from engine.sequence import Sequence
from protocol.speculation import Verification


def draws_natively(sequences: Many[Sequence], verification: Verification) -> bool:
    """Whether `NativeChain` draws as the verification needs it."""
    if any(edits_logits(sequence.params) for sequence in sequences):
        return False
    return verification == "coupled" or all(sequence.params.is_greedy for sequence in sequences)


class NativeChain:
    """Drafts with a decoder whose KV lies under the sequences' blocks.

    A token is the argmax of logit / temperature plus the noise of its position. Filters (top-k and the like)
    are left to the verification: they seldom change the choice. `vocab_size` is the target's.
    """

    def __init__(self, forward: NativeDecoder, vocab_size: int) -> None:
        self._forward = forward
        self._vocab_size = min(forward.vocab_size, vocab_size)

    def draft(
        self,
        sequences: Many[Sequence],
        rows: Many[SequenceRows],
        counts: Many[int],
        before: Tensor | None = None,
    ) -> list[list[int]]:
        """`rows` are those of each sequence, up to its last token, that have yet to be run; `counts` fall. A
        head also takes the hidden states `before` the rows, [rows, hidden_size].
        """
        drafted = self._forward.draft(
            RowArrays.of(rows),
            np.array([[sequence.params.seed for sequence in sequences], counts], np.int64),
            np.array([sequence.params.temperature for sequence in sequences], np.float32),
            self._vocab_size,
            before,
        )
        return [column[:count] for column, count in zip(drafted.T.tolist(), counts, strict=True)]
