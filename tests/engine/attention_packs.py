"""Random packs for attention tests: sequences of (query_len, context_len) over scattered blocks, trees of
query rows, and a float64 reference.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.devices.attention import backend_fault, select_backend
from engine.kv.attention import AttentionMetadata, AttentionOptions, LayerKv
from engine.kv.layout import Segment
from engine.kv.row_codes import KvRows

LAYERS = 3
BACKENDS = [name for name in ("cpu", "sdpa", "torch") if backend_fault(name, torch.device("cpu")) is None]
Masks = list[int]
"""For each query row of a sequence, the rows that it sees."""

# Chunks, chains, decode rows and trees: within a tile, over two, over two splits, and from key 0 on.
CHAINS = [(80, 200), (5, 33), (1, 40), (70, 70)]
TREES = [(24, 300), (64, 130), (40, 530), (10, 10), (2, 700), (1, 65)]
CHAINS_AND_TREES = [pair for both in zip(CHAINS, TREES, strict=False) for pair in both] + TREES[len(CHAINS) :]


@dataclass
class Pack:
    lengths: list[tuple[int, int]]
    keys: list[Tensor]
    """Per sequence all keys, including this step's: [context_len, kv_heads, head_dim]."""
    values: list[Tensor]
    pool: Tensor
    """[blocks, layers, 2, block_size, kv_heads, head_dim]"""
    scales: Tensor | None
    """The scales of quantized rows, as from `Segment.views`."""
    rows: KvRows
    block_size: int
    metadata: AttentionMetadata
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def layers(self) -> list[LayerKv]:
        scales = [None] * LAYERS if self.scales is None else self.scales.unbind(1)
        return [LayerKv.of(*layer) for layer in zip(self.pool.unbind(1), scales, strict=True)]

    def put(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values of each slot, [slots, kv_heads, dim], into all layers."""
        for layer in self.layers:
            put_rows(layer, self.rows, slots, keys, values)


def empty_layer(
    rows: KvRows, kv_heads: int, dims: tuple[int, int], num_blocks: int, block_size: int
) -> LayerKv:
    """Return a layer of a pool of two, with a block's values behind its keys. It is filled with NaN, which
    must not be read.
    """
    segments = [
        Segment(1, kv_heads, dim, rows.dtype, num_planes=1, quantization=rows.quantization) for dim in dims
    ]
    sizes = [segment.block_bytes(block_size) for segment in segments]
    memory = torch.zeros(num_blocks, 2 * sum(sizes), dtype=torch.uint8)
    sides = []
    for segment, part in zip(segments, memory[:, sum(sizes) :].split(sizes, dim=1), strict=True):
        side = segment.views(part, block_size)
        (side.values if side.scales is None else side.scales).fill_(torch.nan)
        sides.append(side.part(slice(None), 0, 0))
    return LayerKv.of_sides(*sides)


def put_rows(layer: LayerKv, rows: KvRows, slots: Tensor, *new: Tensor) -> None:
    """Put keys and values [slots, kv_heads, dim] into a layer."""
    block_size = layer.keys.shape[1]
    blocks, places = slots // block_size, slots % block_size
    for pool, side in zip(layer.sides, new, strict=True):
        stored = rows.encode(side)
        pool.values[blocks, places] = stored.values
        if pool.scales is not None and stored.scales is not None:
            pool.scales[blocks, places] = stored.scales


def describe(lengths: list[tuple[int, int]], block_table: Tensor, slots: Tensor) -> AttentionMetadata:
    return AttentionMetadata(
        query_start=torch.tensor([0] + [q for q, _ in lengths]).cumsum(0).int(),
        context_len=torch.tensor([context for _, context in lengths]).int(),
        block_table=block_table,
        slot_mapping=slots,
        max_query_len=max(q for q, _ in lengths),
        max_context_len=max(context for _, context in lengths),
        query_lens=[q for q, _ in lengths],
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
    """Make a pack. Sequence s gets the numbers of seed first_seed + s, whatever else is in the pack."""
    rows = KvRows(dtype, quantization)
    contexts = [context for _, context in lengths]
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(0)).int()
    segment = Segment(LAYERS, kv_heads, head_dim, dtype, quantization=quantization)
    memory = torch.zeros(len(order), segment.block_bytes(block_size), dtype=torch.uint8)
    pool, scales = segment.views(memory, block_size)
    (scales if scales is not None else pool).fill_(torch.nan)  # must never be read
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
        slots.append(slot)
    pad = torch.zeros(padding, 1, head_dim, dtype=dtype)
    new_slots = [slot[-q:] for slot, (q, _) in zip(slots, lengths, strict=True)]
    metadata = describe(lengths, table, torch.cat([*new_slots, torch.full((padding,), -1)]))
    new_keys = [k[-q:] for k, (q, _) in zip(keys, lengths, strict=True)]
    new_values = [v[-q:] for v, (q, _) in zip(values, lengths, strict=True)]
    pack = Pack(
        lengths,
        keys,
        values,
        pool,
        scales,
        rows,
        block_size,
        metadata,
        torch.cat([*queries, pad.expand(-1, heads, -1)]),
        torch.cat([*new_keys, pad.expand(-1, kv_heads, -1)]),
        torch.cat([*new_values, pad.expand(-1, kv_heads, -1)]),
    )
    for slot, k, v, (q, _) in zip(slots, keys, values, lengths, strict=True):
        pack.put(slot[:-q], k[:-q], v[:-q])
    return pack


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
    attention.plan(pack.metadata)
    attention.begin_step(pack.metadata)
    options = AttentionOptions(scale, window or 0, softcap or 0.0, sinks)
    return attention.forward(layer, pack.query, pack.key, pack.value, options)


def tree_masks(num_rows: int, seed: int) -> Masks:
    """Return the masks of a random tree: each row sees its parent's rows and itself."""
    rng = random.Random(seed)
    masks = [1]
    for row in range(1, num_rows):
        masks.append(masks[rng.randrange(max(0, row - 9), row)] | 1 << row)
    return masks


def chain_masks(num_rows: int) -> Masks:
    return [(2 << row) - 1 for row in range(num_rows)]


def mixed_masks(lengths: list[tuple[int, int]]) -> list[Masks | None]:
    """Return masks, with None for the chains among `CHAINS_AND_TREES`."""
    return [None if pair in CHAINS else tree_masks(pair[0], seed) for seed, pair in enumerate(lengths)]


def with_masks(pack: Pack, masks: list[Masks | None], earlier: int = 0) -> Pack:
    """Return the pack with these masks of its query rows. Trees begin `earlier` keys before the
    query rows.
    """
    flat: Masks = []
    for (query_len, _), of_sequence in zip(pack.lengths, masks, strict=True):
        flat += of_sequence or [0] * query_len
    flat += [0] * (len(pack.metadata.slot_mapping) - len(flat))
    visible = torch.tensor([mask - (mask >> 63 << 64) for mask in flat], dtype=torch.int64)
    starts = [
        -1 if of_sequence is None else context_len - query_len - earlier
        for (query_len, context_len), of_sequence in zip(pack.lengths, masks, strict=True)
    ]
    tree_start = torch.tensor(starts, dtype=torch.int32)
    return replace(pack, metadata=replace(pack.metadata, visible=visible, tree_start=tree_start))


def with_first_keys(pack: Pack, first_keys: list[int]) -> Pack:
    first_key = torch.tensor(first_keys, dtype=torch.int32)
    return replace(pack, metadata=replace(pack.metadata, first_key=first_key))


def decoded(pack: Pack) -> Pack:
    """Return the pack with its rows decoded, not rounded to the pack's dtype."""
    exact = KvRows(torch.float32, pack.rows.quantization)
    keys, values = ([exact.decode(exact.encode(rows)) for rows in side] for side in (pack.keys, pack.values))
    return replace(pack, keys=keys, values=values)


def reference(
    pack: Pack,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    sinks: Tensor | None = None,
    masks: list[Masks | None] | None = None,
    first_keys: list[int] | None = None,
) -> Tensor:
    """Compute attention of each sequence in float64, from the pack's original contexts."""
    out = []
    group = pack.query.shape[1] // pack.key.shape[1]
    rows = [query_len for query_len, _ in pack.lengths]
    padding = len(pack.query) - sum(rows)
    queries = pack.query.double().split([*rows, padding])
    for s, (query_len, context_len) in enumerate(pack.lengths):
        base, first_key = context_len - query_len, first_keys[s] if first_keys else 0
        of_rows = (masks and masks[s]) or chain_masks(query_len)
        own = torch.tensor([base + mask.bit_count() - 1 for mask in of_rows])
        new = torch.tensor([[mask >> i & 1 for i in range(query_len)] for mask in of_rows], dtype=torch.bool)
        seen = torch.cat([torch.ones(query_len, base, dtype=torch.bool), new], dim=1)
        seen &= torch.arange(context_len) >= first_key
        if window:
            seen &= torch.cat([torch.arange(base), own]) > own[:, None] - window
        k = pack.keys[s].double().repeat_interleave(group, dim=1)
        v = pack.values[s].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", queries[s], k) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, query_len, 1)], dim=2)
        weights = scores.softmax(-1)[..., :context_len].masked_fill(~seen, 0)  # a row may see nothing
        out.append(torch.einsum("hqk,khd->qhd", weights, v))
    out.append(torch.zeros(padding, pack.query.shape[1], pack.value.shape[2], dtype=torch.float64))
    return torch.cat(out)
