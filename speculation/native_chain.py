"""Drafting chains in one native call: what is new is read, a token chosen, run, the next one chosen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch.rows import RowArrays, SequenceRows
from engine.devices.cpu.decoder.forward import NativeDecoder
from engine.sampler.rows import edits_logits
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.speculation import Verification


class NativeChain:
    """Drafts with a decoder whose KV lies under the sequences' blocks.

    Under coupled verification a token is the argmax of logit / temperature plus the noise of its position;
    under the others it is drawn from their softmax. Filters (top-k and the like) are left to the
    verification: they seldom change the choice. `vocab_size` is the target's.
    """

    def __init__(self, forward: NativeDecoder, vocab_size: int, verification: Verification) -> None:
        self._forward = forward
        self._vocab_size = vocab_size
        self._shares_noise = verification == "coupled"

    def can_draft(self, sequences: Sequence[SequenceState]) -> bool:
        return not any(edits_logits(sequence.params) for sequence in sequences)

    def draft(
        self,
        sequences: Sequence[SequenceState],
        rows: Sequence[SequenceRows],
        counts: Sequence[int],
        before: Tensor | None = None,
    ) -> list[Draft]:
        """`rows` are those of each sequence, up to its last token, that have yet to be run; `counts` fall. A
        head also takes the hidden states `before` the rows, [rows, hidden_size].
        """
        by_chance = [not (self._shares_noise or sequence.params.is_greedy) for sequence in sequences]
        distributions = None
        if any(by_chance):
            distributions = torch.empty((len(sequences), counts[0], self._vocab_size))
        drafted = self._forward.draft(
            RowArrays.of(rows, self._forward.block_table),
            np.array([[sequence.params.seed for sequence in sequences], counts], np.int64),
            np.array([sequence.params.temperature for sequence in sequences], np.float32),
            min(self._forward.vocab_size, self._vocab_size),
            before,
            distributions,
        )
        drafts = [Draft(column[:count]) for column, count in zip(drafted.T.tolist(), counts, strict=True)]
        if distributions is not None:
            for draft, drawn, is_drawn in zip(drafts, distributions, by_chance, strict=True):
                draft.distributions = drawn[: draft.num_nodes] if is_drawn else None
        return drafts
