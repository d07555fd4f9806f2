"""Drafting of trees with a model.

On a GPU trees grow on the device, and the host waits for nothing. If the host must know the rows of each
level, the likeliest tokens and their scores are copied to it, once per level, and the trees grow there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.batch.runner import ForwardOutput, Runner, Step
from engine.batch.step_inputs import BlockTable, SequenceRows, StepShape, step_inputs
from engine.copies import upload_to
from engine.sampler import Sampler
from engine.sampler.rows import needs_history
from engine.step.draft import Draft, LateTrees
from engine.step.sequence import SequenceState
from protocol.speculation import SpeculativeConfig
from speculation.chains import ChainDrafting, DraftRows, RowsOf, run_last, stays_on_device
from speculation.drawing import best_of, in_whole_vocabulary, rank
from speculation.tree_growth import TREE_WIDTH, TreeGrowth, TreeLevel


class TreeDrafting:
    def __init__(
        self,
        runner: Runner,
        options: SpeculativeConfig,
        rows_of: RowsOf,
        sampler: Sampler,
        draft_ids: Tensor | None = None,
        *,
        block_size: int,
        recurs: bool,
    ) -> None:
        """Take the arguments of `ChainDrafting`, and the KV pool's `block_size`. If a layer `recurs`, the
        host must know which rows follow which.
        """
        device = sampler.device
        self._runner, self._rows_of = runner, rows_of
        self._draft_ids, self._vocab_size = draft_ids, sampler.vocab_size
        self._depth = options.max_speculative_tokens
        self._with_noise = options.verification == "coupled"
        self._block_size = block_size
        self._on_device = stays_on_device(runner, device) and not recurs
        self._device = device
        self._upload_rows, self._upload_sources = upload_to(device), upload_to(device)
        self._upload_rooms = upload_to(device if self._on_device else torch.device("cpu"))
        self._download = sampler.download

    def is_native(self, sequences: Sequence[SequenceState]) -> bool:
        """Return whether `draft` is one native call: never."""
        return False

    def warm_up(self, hidden: Tensor | None = None) -> None:
        """Compile the kernels that grow trees. `hidden` [1, size] is given if rows run on hidden states."""
        if not self._on_device:
            return
        scores = torch.zeros((1, TREE_WIDTH), device=self._device)
        growth = self._growth([1])
        level = growth.grow(scores, scores.long())
        if hidden is not None:
            level.before(hidden)
        rows, table = SequenceRows([0], 1, [[0]], [1], tree_start=0), BlockTable(self._block_size)
        level.fill(step_inputs([rows], [0], self._upload_rows, table, StepShape()))
        growth.end(scores, scores.long())

    def _growth(self, max_nodes: Sequence[int]) -> TreeGrowth:
        return TreeGrowth(
            max_nodes, TREE_WIDTH, self._block_size, self._upload_rooms, by_kernels=self._on_device
        )

    def draft(
        self,
        sequences: Sequence[SequenceState],
        rows: Sequence[SequenceRows],
        counts: Sequence[int],
        hidden: Tensor | None = None,
    ) -> list[Draft | None]:
        """Draft like `ChainDrafting.draft`, at most `counts` nodes. None if no token has a finite score."""
        growth = self._growth(counts)
        output = run_last(self._runner, rows, hidden)
        best = self._rank(output.logits, sequences, [1] * len(sequences), 0)
        for depth in range(1, 1 + min(self._depth - 1, counts[0])):
            level = growth.grow(*best)
            grown = level.unknown_rows(counts) if self._on_device else level.rows()
            if not any(its.token_ids for its in grown):
                best = best[0][:0], best[1][:0]
                break
            output = self._run_level(sequences, level, grown, output.hidden)
            best = self._rank(output.logits, sequences, [len(its.token_ids) for its in grown], depth)
        nodes = growth.end(*best)
        if self._on_device and not any(needs_history(sequence.params) for sequence in sequences):
            return self._late_drafts(nodes, counts)
        return drafts_of(self._download(nodes) if self._on_device else nodes)

    def _run_level(
        self,
        sequences: Sequence[SequenceState],
        level: TreeLevel,
        grown: Sequence[DraftRows],
        hidden: Tensor | None,
    ) -> ForwardOutput:
        trees = zip(sequences, grown, strict=True)
        batch = [self._rows_of(sequence, its) for sequence, its in trees if its.token_ids]
        if hidden is not None:
            hidden = (
                level.before(hidden) if level.followed is None else self._followed(hidden, level.followed)
            )
        every = range(sum(len(its.token_ids) for its in grown))
        step = Step(batch, every, hidden is not None, hidden)
        return self._runner.run(step, level.fill if self._on_device else None)

    def _followed(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return hidden.index_select(0, self._upload_sources([rows.numpy()])[0])

    def _late_drafts(self, nodes: Tensor, counts: Sequence[int]) -> list[Draft | None]:
        late = LateTrees(nodes.flatten(1), self._download)
        firsts = range(0, len(counts) * counts[0], counts[0])
        return [
            Draft([~(first + node) for node in range(count)], [-1] * count, late=late)
            for first, count in zip(firsts, counts, strict=True)
        ]

    def _rank(
        self, logits: Tensor, sequences: Sequence[SequenceState], each_has: Sequence[int], depth: int
    ) -> tuple[Tensor, Tensor]:
        """Return the likeliest tokens after `each_has[i]` rows of tree i, `depth` tokens after the roots."""
        after = [sequence for sequence, count in zip(sequences, each_has, strict=True) for _ in range(count)]
        params = [sequence.params for sequence in after]
        positions = [sequence.position + depth for sequence in after]
        logits = in_whole_vocabulary(logits, self._draft_ids, self._vocab_size)
        ranked = rank(logits, params, positions, self._upload_rows, with_noise=self._with_noise)
        scores, token_ids = best_of(*ranked, TREE_WIDTH)
        if self._on_device or self._device.type == "cpu":
            return scores, token_ids
        both = self._download(torch.stack([scores.double(), token_ids.double()]))  # exact in float64
        return both[0].float(), both[1].long()


def drafting_of(
    runner: Runner,
    options: SpeculativeConfig,
    rows_of: RowsOf,
    sampler: Sampler,
    draft_ids: Tensor | None = None,
    *,
    block_size: int,
    recurs: bool,
) -> ChainDrafting | TreeDrafting:
    made = runner, options, rows_of, sampler, draft_ids
    if options.tree:
        return TreeDrafting(*made, block_size=block_size, recurs=recurs)
    return ChainDrafting(*made)


def drafts_of(nodes: Tensor) -> list[Draft | None]:
    """Convert the nodes of `TreeGrowth.end`, on the host, to drafts."""
    drafts: list[Draft | None] = []
    for token_ids, rows_before in nodes[:2].transpose(0, 1).tolist():
        parents = [row - 1 for row in rows_before if row >= 0]
        drafts.append(Draft(token_ids[: len(parents)], parents) if parents else None)
    return drafts
