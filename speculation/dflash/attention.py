"""Attention of a draft block: some layers attend causally, the others to all places of the block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.devices.attention import TablesBackend
from engine.kv.attention import AttentionBackend, AttentionMetadata, LayerKv


class BlockBackend(TablesBackend):
    """Attention over the layers of one pool, where each layer has its `sight`: None if its rows see no later
    one, else the tokens that a row sees before itself and with itself, 0 for all, beside all later rows.
    """

    is_causal = False

    def __init__(
        self, backend: type[AttentionBackend], layers: Sequence[LayerKv], sights: Sequence[int | None]
    ) -> None:
        self._sights = list(dict.fromkeys(sights))
        super().__init__([backend(layers) for _ in self._sights], list(map(self._sights.index, sights)))
        self.num_tables, self.can_capture = 1, False

    def begin_step(self, metadata: AttentionMetadata) -> None:
        for sight, backend in zip(self._sights, self.backends, strict=True):
            backend.begin_step(metadata if sight is None else _whole(metadata, sight))


def _whole(metadata: AttentionMetadata, sight: int) -> AttentionMetadata:
    """Make each row a sequence of its own with the keys of all rows."""
    starts = metadata.query_start.long()
    counts = starts.diff()
    owners = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    rows = torch.arange(len(owners), device=counts.device)
    context_len = metadata.context_len[owners]
    first_key = torch.zeros_like(context_len)
    if metadata.first_key is not None:
        first_key = metadata.first_key[owners]
    if sight:
        places = context_len - counts[owners] + rows - starts[owners]
        first_key = first_key.maximum(places + 1 - sight).int()
    return replace(
        metadata,
        query_start=torch.arange(len(owners) + 1, dtype=torch.int32, device=counts.device),
        context_len=context_len,
        block_table=metadata.block_table[owners],
        first_key=first_key,
        max_query_len=1,
        query_lens=[1] * len(owners),
    )
