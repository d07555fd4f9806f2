"""Drafting trees with a model. The host waits for the device once for each level of them: the likeliest
tokens and their scores come in one copy, and what it answers with goes there without a wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.download import Downloader
from engine.draft import Draft
from engine.runner import ForwardOutput
from engine.sequence import SequenceState
from engine.upload import upload_to
from protocol.speculation import SpeculativeConfig
from speculation.ranking import rank
from speculation.tree import TREE_WIDTH, DraftTrees, TreeRows

RunRows = Callable[[list[TreeRows], Tensor | None], ForwardOutput]
"""Runs rows of each sequence, whose parents have those hidden states. Of each row there are logits
[rows, vocab_size], and hidden states if rows are run on these.
"""


class TreeDrafting:
    def __init__(self, options: SpeculativeConfig, device: torch.device) -> None:
        self._depth = options.max_speculative_tokens
        self._with_noise = options.verification == "coupled"
        self._upload_rows, self._upload_sources = upload_to(device), upload_to(device)
        self._download = Downloader(device)

    def draft(
        self, sequences: Sequence[SequenceState], counts: Sequence[int], first: ForwardOutput, run: RunRows
    ) -> list[Draft | None]:
        """Of at most `counts` nodes. `first` is of each sequence's last token."""
        trees = DraftTrees(counts, self._depth, TREE_WIDTH, self._download)
        logits, hidden = first
        depths = [[0] for _ in sequences]
        while True:
            grown = trees.grow(*self._rank(logits, sequences, depths))
            depths = [rows.depths for rows in grown]
            if not any(depths):
                return trees.drafts()
            before = None if hidden is None else hidden.index_select(0, self._sources(grown))
            logits, hidden = run(grown, before)

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
