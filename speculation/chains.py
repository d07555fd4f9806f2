"""Drafting of chains with a model: in one native call if its decoder can, else with one forward per token.

On a GPU the tokens stay on the device, where the next forward and the verification read them, so the host
waits for none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.batch.runner import ChainDrafter, ForwardOutput, Runner, Step
from engine.batch.step_inputs import RowArrays, SequenceRows
from engine.sampler import Sampler
from engine.sampler.rows import edits_logits, needs_history
from engine.step.draft import Draft, LateTokens
from engine.step.sequence import SequenceState
from protocol.speculation import SpeculativeConfig, Verification
from speculation.drawing import Drawing, DrawnTokens


class DraftRows(NamedTuple):
    """Rows of one draft to run next. Row 0 of a draft is its sequence's last token, row i + 1 its token i;
    the rows here start with row `first`. `masks`, given for trees, have bit i for each row i on the path to a
    row, including the row itself.
    """

    first: int
    token_ids: list[int]
    masks: list[int] | None = None


RowsOf = Callable[[SequenceState, DraftRows], SequenceRows]
"""The conversion of a draft's rows to rows of a forward."""


def stays_on_device(runner: Runner, device: torch.device) -> bool:
    """Return whether drafts stay on the device: neither host nor runner needs them at once."""
    return device.type != "cpu" and runner.can_fill


def run_last(runner: Runner, batch: Sequence[SequenceRows], hidden: Tensor | None) -> ForwardOutput:
    """Run rows. Return the logits and, for a head, the hidden states of each sequence's last row."""
    ends = [end - 1 for end in accumulate(len(rows.token_ids) for rows in batch)]
    return runner.run(Step(batch, ends, hidden is not None, hidden))


class ChainDrafting:
    def __init__(
        self,
        runner: Runner,
        options: SpeculativeConfig,
        rows_of: RowsOf,
        sampler: Sampler,
        draft_ids: Tensor | None = None,
    ) -> None:
        """Draw with `sampler`, which must forget requests. Draft token i is `draft_ids[i]`, or i without."""
        self._runner = runner
        self._rows_of = rows_of
        self._drawing = Drawing(sampler, options.verification, draft_ids)
        self._download = sampler.download
        self._stays_on_device = stays_on_device(runner, sampler.device)
        self._native: NativeChain | None = None
        if runner.chains is not None:
            self._native = NativeChain(runner.chains, sampler.vocab_size, options.verification)

    def warm_up(self, hidden: Tensor | None = None) -> None:
        """Do nothing: the kernels that draw are compiled with the target's sampler."""

    def is_native(self, sequences: Sequence[SequenceState]) -> bool:
        """Return whether `draft` is one native call."""
        return self._native is not None and self._native.can_draft(sequences)

    def draft(
        self,
        sequences: Sequence[SequenceState],
        rows: Sequence[SequenceRows],
        counts: Sequence[int],
        hidden: Tensor | None = None,
    ) -> list[Draft]:
        """Draft `counts[i]` tokens (descending) for each sequence. `rows` are its rows up to the last token
        that were not run before, for a head with the `hidden` states before them.
        """
        if self._native is not None and self._native.can_draft(sequences):
            return self._native.draft(sequences, rows, counts, hidden)
        is_late = self._stays_on_device and not any(needs_history(each.params) for each in sequences)
        chains: list[list[int]] = [[] for _ in sequences]
        drawn: list[DrawnTokens] = []
        output = run_last(self._runner, rows, hidden)
        for place in range(counts[0]):
            growing = sequences[: sum(count > place for count in counts)]
            if place:
                output = self._run_drafted(growing, chains, output.hidden, drawn[-1] if is_late else None)
            drawn.append(self._drawing.draw(growing, output.logits, chains[: len(growing)]))
            token_ids = [0] * len(growing) if is_late else drawn[-1].token_ids.clamp_min(0).tolist()
            for chain, token_id in zip(chains, token_ids, strict=False):
                chain.append(token_id)
        drafts = [Draft(chain) for chain in chains]
        if is_late:
            self._leave_on_device(drafts, drawn)
        for row, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            if drawn[0].distributions is not None and not sequence.params.is_greedy:
                its = (each.distributions for each in drawn[: len(draft.ids)])
                draft.distributions = torch.stack([each[row] for each in its if each is not None])
        return drafts

    def _run_drafted(
        self,
        sequences: Sequence[SequenceState],
        chains: Sequence[Sequence[int]],
        hidden: Tensor | None,
        late: DrawnTokens | None,
    ) -> ForwardOutput:
        """Run the newest token of each chain, taken from `late` if the host does not know it."""
        batch = [
            self._rows_of(sequence, DraftRows(len(chain), [chain[-1] if late is None else ~row]))
            for row, (sequence, chain) in enumerate(zip(sequences, chains, strict=False))
        ]
        before = None if hidden is None else hidden[: len(batch)]
        fill = None if late is None else LateTokens(late.token_ids, self._download).fill
        return self._runner.run(Step(batch, range(len(batch)), hidden is not None, before), fill)

    def _leave_on_device(self, drafts: Sequence[Draft], drawn: Sequence[DrawnTokens]) -> None:
        late = LateTokens(torch.cat([each.token_ids for each in drawn]).clamp_min(0), self._download)
        firsts = [0, *accumulate(len(each.token_ids) for each in drawn)]
        for row, draft in enumerate(drafts):
            draft.ids, draft.late = [~(first + row) for first in firsts[: len(draft.ids)]], late


class NativeChain:
    """A drafter of chains with a native decoder whose KV is stored under the sequences' block ids.

    Under coupled verification a token is the argmax of logit / temperature plus the noise of its position;
    under the other rules it is drawn from the softmax. Filters (top-k and the like) are left to the
    verification, since they seldom change the choice. `vocab_size` is the target's.
    """

    def __init__(self, forward: ChainDrafter, vocab_size: int, verification: Verification) -> None:
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
        """Draft `counts[i]` tokens (descending) for each sequence. `rows` are its rows up to the last token
        that were not run before; a head also takes the hidden states `before` them, [rows, hidden_size].
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
