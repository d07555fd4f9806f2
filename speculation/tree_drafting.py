"""Drafting trees with a model.

Where the host grows them, it waits for the device once for each level: the likeliest tokens and their scores
come in one copy, and what it answers with goes there without a wait. Where they grow on the device, as the
host need not know them before they are verified, it waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.batch.rows import BlockTable, SequenceRows
from engine.batch.runner import Fill, ForwardOutput, Runner
from engine.batch.step_inputs import StepShape, step_inputs
from engine.devices.loaded_model import LoadedModel
from engine.download import Downloader
from engine.sampler.rows import needs_history
from engine.step.draft import Draft
from engine.step.late_trees import LateTrees
from engine.step.sequence import SequenceState
from engine.upload import upload_to
from protocol.speculation import SpeculativeConfig
from speculation.ranking import rank
from speculation.tree import TREE_WIDTH, DraftTrees, TreeRows
from speculation.tree_growth import TreeGrowth

RunRows = Callable[[list[TreeRows], Tensor | None, Fill | None], ForwardOutput]
"""Runs rows of each sequence, with the hidden states of the rows before them, completed on the device.
Returns logits [rows, vocab_size] for every row, and hidden states if the next rows need them.
"""


class TreeDrafting:
    def __init__(
        self, options: SpeculativeConfig, device: torch.device, block_size: int, *, on_device: bool
    ) -> None:
        """`block_size` is the KV pool's; `on_device` says where trees grow if they can."""
        self._depth = options.max_speculative_tokens
        self._with_noise = options.verification == "coupled"
        self._block_size = block_size
        self._on_device = on_device
        self._device = device
        self._upload_rows, self._upload_sources, self._upload_rooms = (upload_to(device) for _ in range(3))
        self._download = Downloader(device)

    def warm_up(self, hidden: Tensor | None = None) -> None:
        """Compile what grows trees on the device. `hidden` [1, size]: rows are run on such states."""
        if not self._on_device:
            return
        scores = torch.zeros((1, TREE_WIDTH), device=self._device)
        growth = TreeGrowth([1], TREE_WIDTH, self._block_size, self._upload_rooms)
        level = growth.grow(scores, scores.long())
        if hidden is not None:
            level.before(hidden)
        rows, table = SequenceRows([0], 1, [[0]], [1], tree_start=0), BlockTable(self._block_size)
        level.fill(step_inputs([rows], [0], self._upload_rows, table, StepShape()))
        growth.end(scores, scores.long())

    def draft(
        self, sequences: Sequence[SequenceState], counts: Sequence[int], first: ForwardOutput, run: RunRows
    ) -> list[Draft | None]:
        """Of at most `counts` nodes, which fall. `first` is of each sequence's last token."""
        if self._on_device and not any(needs_history(sequence.params) for sequence in sequences):
            return self._grown_on_device(sequences, counts, first, run)
        trees = DraftTrees(counts, self._depth, TREE_WIDTH, self._download)
        logits, hidden = first
        depths = [[0] for _ in sequences]
        while True:
            grown = trees.grow(*self._rank(logits, sequences, depths))
            depths = [rows.depths for rows in grown]
            if not any(depths):
                return trees.drafts()
            before = None if hidden is None else hidden.index_select(0, self._sources(grown))
            logits, hidden = run(grown, before, None)

    def _grown_on_device(
        self, sequences: Sequence[SequenceState], counts: Sequence[int], first: ForwardOutput, run: RunRows
    ) -> list[Draft | None]:
        growth = TreeGrowth(counts, TREE_WIDTH, self._block_size, self._upload_rooms)
        logits, hidden = first
        depths = [0]
        for depth in range(1, 1 + min(self._depth - 1, counts[0])):
            level = growth.grow(*self._rank(logits, sequences, [depths] * len(sequences)))
            depths = [depth] * level.num_rows
            before = None if hidden is None else level.before(hidden)
            rows = [unknown_rows(min(depth * TREE_WIDTH, count), len(depths)) for count in counts]
            logits, hidden = run(rows, before, level.fill)
        nodes = growth.end(*self._rank(logits, sequences, [depths] * len(sequences)))
        late = LateTrees(nodes, self._download)
        firsts = range(0, len(counts) * counts[0], counts[0])
        return [
            Draft([~(first + node) for node in range(count)], [-1] * count, late=late)
            for first, count in zip(firsts, counts, strict=True)
        ]

    def _rank(
        self, logits: Tensor, sequences: Sequence[SequenceState], depths: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """`rank`, where `logits` has a row for each of a sequence's depths: after so many drafted tokens."""
        after = [(sequence, depth) for sequence, its in zip(sequences, depths, strict=True) for depth in its]
        params = [sequence.params for sequence, _ in after]
        positions = [sequence.position + depth for sequence, depth in after]
        return rank(logits, params, positions, self._upload_rows, with_noise=self._with_noise)

    def _sources(self, grown: Sequence[TreeRows]) -> Tensor:
        (sources,) = self._upload_sources([np.array([i for rows in grown for i in rows.sources], np.int64)])
        return sources


def can_grow_on_device(runner: Runner, draft: LoadedModel, *others: LoadedModel) -> bool:
    """Whether trees may grow on the device: there is something to wait for, and what runs them can. Recurrent
    layers must know on the host which rows follow which.
    """
    is_cpu = draft.device.type == "cpu"
    recurs = any(model.recurrent is not None for model in (draft, *others))
    return not is_cpu and not recurs and runner.can_fill


def unknown_rows(end: int, count: int) -> TreeRows:
    """Of which the host knows that their tree has at most `end` rows behind its root by then. They begin
    anywhere, even before the text.
    """
    return TreeRows(first=1 + end - count, token_ids=[0] * count, masks=[1] * count)
