"""Drafting chains with a model: in one native call where its decoder can, else one forward a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine.batch.rows import SequenceRows
from engine.batch.runner import ForwardOutput, Runner, Step
from engine.devices.cpu.decoder.forward import NativeDecoder
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.speculation import Verification
from speculation.chains_ahead import chains_ahead
from speculation.drawing import Chain, Drawing
from speculation.native_chain import NativeChain

NumberOf = Callable[[SequenceState], int]


class ChainDrafting:
    """`vocab_size` is the target's: `runner` may have more logits. `sampler` must forget requests. Where the
    runner has recurrent layers, `state_slot_of` says where a sequence's state is, and `certain_of` how
    many of its tokens that may come to have.
    """

    def __init__(
        self,
        runner: Runner,
        vocab_size: int,
        verification: Verification,
        sampler: Sampler,
        device: torch.device,
        state_slot_of: NumberOf = lambda sequence: 0,
        certain_of: NumberOf = lambda sequence: len(sequence.token_ids),
    ) -> None:
        self._runner = runner
        self._state_slot_of, self._certain_of = state_slot_of, certain_of
        self._vocab_size = vocab_size
        self._drawing = Drawing(sampler, verification)
        self._ahead = chains_ahead(runner, self._drawing, device, self.row)
        self._native: NativeChain | None = None
        if isinstance(runner, NativeDecoder) and runner.drafts:
            self._native = NativeChain(runner, vocab_size, verification)

    def draft(
        self, sequences: Sequence[SequenceState], rows: Sequence[SequenceRows], counts: Sequence[int]
    ) -> list[Draft]:
        """`rows` are those of each sequence, up to its last token, that have yet to be run; `counts` fall."""
        if self._native is not None and self._native.can_draft(sequences):
            return self._native.draft(sequences, rows, counts)
        if self._ahead is not None and self._ahead.can_draft(sequences):
            return self._ahead.draft(sequences, counts, self._run(rows), self._whole)
        growing = chains = [Chain(sequence) for sequence in sequences]
        wanted = dict(zip(sequences, counts, strict=True))
        batch = [*rows]
        while growing:
            self._drawing.extend(growing, self.logits(batch))
            growing = [chain for chain in growing if len(chain.token_ids) < wanted[chain.sequence]]
            batch = [
                self.row(chain.sequence, chain.token_ids[-1], len(chain.token_ids) - 1) for chain in growing
            ]
        return [chain.draft() for chain in chains]

    def logits(self, batch: Sequence[SequenceRows]) -> Tensor:
        """After each sequence's last row, [sequences, vocab_size]."""
        return self._whole(self._run(batch).logits)

    def _run(self, batch: Sequence[SequenceRows]) -> ForwardOutput:
        ends = [end - 1 for end in accumulate(len(rows.token_ids) for rows in batch)]
        return self._runner.run(Step(batch, ends, wants_hidden=False))

    def _whole(self, logits: Tensor) -> Tensor:
        return logits[:, : self._vocab_size]

    def row(self, sequence: SequenceState, token_id: int, place: int) -> SequenceRows:
        """Of a drafted token; of the sequence's last one at place -1."""
        start, blocks = len(sequence.token_ids) + place, sequence.held.blocks
        state_slot, certain = self._state_slot_of(sequence), self._certain_of(sequence)
        return SequenceRows([token_id], start, blocks, state_slot=state_slot, certain=certain)
