"""Attention over a pool whose layers lie in several block tables: a backend for each table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from engine.kv.attention import AttentionBackend, AttentionMetadata, LayerKv
from engine.kv.layout import Group


class TablesBackend(AttentionBackend):
    """Attention over all layers of a group. The metadata have the block table [num_tables, num_seqs,
    max_blocks] and the slots [num_tables, total_tokens] of each table.
    """

    def __init__(self, backends: Sequence[AttentionBackend], tables: Sequence[int]) -> None:
        """`backends` has one of all layers for each table; `tables` has the table of each layer."""
        self.name, self.block_size = backends[0].name, backends[0].block_size
        self.num_tables = len(backends)
        self.can_capture, self.deterministic = backends[0].can_capture, backends[0].deterministic
        self.backends, self.tables = backends, tables
        self._by_layer = [backends[table] for table in tables]

    def plan(self, metadata: AttentionMetadata) -> None:
        for backend in self.backends:
            backend.plan(metadata)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        tables = zip(self.backends, metadata.block_table, metadata.slot_mapping, strict=True)
        for backend, block_table, slots in tables:
            backend.begin_step(replace(metadata, block_table=block_table, slot_mapping=slots))

    def forward(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return self._by_layer[layer].forward(layer, query, key, value, **options)


def backend_over(
    backend: type[AttentionBackend], layers: Sequence[LayerKv], group: Group
) -> AttentionBackend:
    """Return attention over these layers of a pool, which are the group's."""
    backends = [backend(layers, group.rows) for _ in group.windows]
    if len(backends) == 1:
        return backends[0]
    return TablesBackend(backends, [place.table for place in group.layers])


def by_table(backend: AttentionBackend) -> tuple[Sequence[AttentionBackend], Sequence[int] | None]:
    """Return the backend of each block table, and the table of each layer; None where all lie in one."""
    if isinstance(backend, TablesBackend):
        return backend.backends, backend.tables
    return [backend], None
