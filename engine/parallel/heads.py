"""Which attention heads a rank computes, and its part of the attention of a model that hands over all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from engine.kv.attention import AttentionBackend, AttentionMetadata
from engine.parallel.group import Columns, Ranks


class Heads(NamedTuple):
    """A rank's attention heads, and the KV heads that they read, of which each serves equally many here."""

    queries: range
    keys: range


def own_heads(queries: int, keys: int, ranks: Ranks) -> Heads:
    """Return a rank's share of the attention and KV heads. With more ranks than KV heads, several ranks have
    the same one: each writes the same values to its place in the pool, and has some of its attention heads.
    """
    group = queries // keys
    if ranks.size <= keys:
        own = ranks.own(keys)
        return Heads(range(own.start * group, own.stop * group), own)
    key = ranks.rank * keys // ranks.size
    sharing = [rank for rank in range(ranks.size) if rank * keys // ranks.size == key]
    place = sharing.index(ranks.rank)
    first, last = (key * group + end * group // len(sharing) for end in (place, place + 1))
    return Heads(range(first, last), range(key, key + 1))


class OwnHeads(AttentionBackend):
    """Attention over the pool's own KV heads: attends with the rank's own heads, and gathers."""

    def __init__(self, backend: AttentionBackend, heads: Sequence[Heads], ranks: Ranks) -> None:
        """`heads` are those of each layer."""
        self.name, self.block_size = backend.name, backend.block_size
        self.num_tables = backend.num_tables
        self._backend = backend
        self._heads = heads
        self._ranks = ranks

    def plan(self, metadata: AttentionMetadata) -> None:
        self._backend.plan(metadata)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._backend.begin_step(metadata)

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `AttentionBackend.forward`, of all heads. Raises LostRankError."""
        queries, keys = (slice(heads.start, heads.stop) for heads in self._heads[layer])
        attended = self._backend.forward(
            layer,
            query[:, queries],
            key[:, keys],
            value[:, keys],
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=None if sinks is None else sinks[queries],
        )
        (rows, count, _), size = query.shape, value.shape[2]
        columns = Columns(range(queries.start * size, queries.stop * size), count * size)
        return self._ranks.gather(attended.flatten(1), columns).view(rows, count, size)
