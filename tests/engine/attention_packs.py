"""Random packs for the attention tests: sequences of (query_len, context_len) over scattered blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.interface import AttentionMetadata, LayerKv
from engine.attention.select import select_backend
from engine.kv_rows import KvRows

LAYERS = 3


@dataclass
class Pack:
    lengths: list[tuple[int, int]]
    keys: list[Tensor]
    """Per sequence [context_len, kv_heads, head_dim]: all its keys, this step's included."""
    values: list[Tensor]
    pool: Tensor
    rows: KvRows
    block_size: int
    metadata: AttentionMetadata
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def layers(self) -> list[LayerKv]:
        return [LayerKv.of(layer) for layer in self.pool.unbind(1)]


def describe(lengths: list[tuple[int, int]], block_table: Tensor, slots: Tensor) -> AttentionMetadata:
    return AttentionMetadata(
        query_start=torch.tensor([0] + [q for q, _ in lengths]).cumsum(0).int(),
        context_len=torch.tensor([context for _, context in lengths]).int(),
        block_table=block_table,
        slot_mapping=slots,
        max_query_len=max(q for q, _ in lengths),
        max_context_len=max(context for _, context in lengths),
    )


def make_pack(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    first_seed: int = 0,
    quantization: str = "none",
) -> Pack:
    """Sequence s has the numbers of seed first_seed + s, whatever else is in the pack."""
    rows = KvRows(dtype, quantization)
    contexts = [context for _, context in lengths]
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(0)).int()
    unowned = torch.full((len(order), LAYERS, 2, block_size, kv_heads, head_dim), torch.nan, dtype=dtype)
    pool = rows.encode(unowned)  # NaN: must never be read
    table = torch.zeros(len(lengths), max(counts) + 2, dtype=torch.int32)
    keys, values, queries, slots, taken = [], [], [], [], 0
    for s, (query_len, context) in enumerate(lengths):
        generator = torch.Generator().manual_seed(first_seed + s)
        keys.append(torch.randn(context, kv_heads, head_dim, generator=generator).to(dtype))
        values.append(torch.randn(context, kv_heads, head_dim, generator=generator).to(dtype))
        queries.append(torch.randn(context, heads, head_dim, generator=generator).to(dtype)[-query_len:])
        table[s, : counts[s]] = order[taken : taken + counts[s]]
        taken += counts[s]
        positions = torch.arange(context)
        slot = table[s, positions // block_size].long() * block_size + positions % block_size
        for layer in range(LAYERS):
            past = slot[: context - query_len]
            pool[past // block_size, layer, 0, past % block_size] = rows.encode(
                keys[s][: context - query_len]
            )
            pool[past // block_size, layer, 1, past % block_size] = rows.encode(
                values[s][: context - query_len]
            )
        slots.append(slot[-query_len:])
    pad = torch.zeros(padding, 1, head_dim, dtype=dtype)
    metadata = describe(lengths, table, torch.cat([*slots, torch.full((padding,), -1)]))
    new_keys = [k[-q:] for k, (q, _) in zip(keys, lengths, strict=True)]
    new_values = [v[-q:] for v, (q, _) in zip(values, lengths, strict=True)]
    return Pack(
        lengths,
        keys,
        values,
        pool,
        rows,
        block_size,
        metadata,
        torch.cat([*queries, pad.expand(-1, heads, -1)]),
        torch.cat([*new_keys, pad.expand(-1, kv_heads, -1)]),
        torch.cat([*new_values, pad.expand(-1, kv_heads, -1)]),
    )


def run(
    backend: str,
    pack: Pack,
    *,
    layer: int = 1,
    scale: float = 0.125,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    cls, _ = select_backend(pack.pool.device, pack.rows.dtype, backend)
    attention = cls(pack.layers, rows=pack.rows)
    attention.begin_step(pack.metadata)
    new = (pack.query, pack.key, pack.value)
    return attention.forward(layer, *new, scale=scale, sliding_window=window, softcap=softcap, sinks=sinks)
