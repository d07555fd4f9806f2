"""Drafting chains with a model: in one native call where its decoder can, else one forward a token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from engine.decoder.forward import DecoderForward
from engine.draft import Draft
from engine.rows import SequenceRows
from engine.runner import Runner
from engine.sampler import Sampler
from engine.sequence import SequenceState
from protocol.speculation import Verification
from speculation.drawing import Chain, Drawing
from speculation.native_chain import NativeChain


class ChainDrafting:
    """`vocab_size` is the target's: `runner` may have more logits. `sampler` must forget requests."""

    def __init__(self, runner: Runner, vocab_size: int, verification: Verification, sampler: Sampler) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._drawing = Drawing(sampler, verification)
        self._native: NativeChain | None = None
        if isinstance(runner, DecoderForward):
            self._native = NativeChain(runner, vocab_size, verification)

    def draft(
        self, sequences: Sequence[SequenceState], rows: Sequence[SequenceRows], counts: Sequence[int]
    ) -> list[Draft]:
        """`rows` are those of each sequence, up to its last token, that have yet to be run; `counts` fall."""
        if self._native is not None and self._native.can_draft(sequences):
            return self._native.draft(sequences, rows, counts)
        growing = chains = [Chain(sequence) for sequence in sequences]
        wanted = dict(zip(sequences, counts, strict=True))
        batch = [*rows]
        while growing:
            self._drawing.extend(growing, self.logits(batch))
            growing = [chain for chain in growing if len(chain.token_ids) < wanted[chain.sequence]]
            batch = [_newest_row(chain) for chain in growing]
        return [chain.draft() for chain in chains]

    def logits(self, batch: Sequence[SequenceRows]) -> Tensor:
        """After each sequence's last row, [sequences, vocab_size]."""
        ends = [end - 1 for end in accumulate(len(rows.token_ids) for rows in batch)]
        return self._runner.run(batch, ends).logits[:, : self._vocab_size]


def _newest_row(chain: Chain) -> SequenceRows:
    place = len(chain.sequence.token_ids) + len(chain.token_ids) - 1
    return SequenceRows(chain.token_ids[-1:], place, chain.sequence.held.blocks)
