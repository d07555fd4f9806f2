"""Steps of chains and trees of any lengths for the CPU's attention backends, and a float64 reference."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from engine.devices.attention import backend_fault, select_backend
from engine.kv.attention import AttentionMetadata, AttentionOptions
from tests.engine.interpreted.cases import Case, Options, Sequence, Shape, Step

BACKENDS = [name for name in ("cpu", "sdpa", "torch") if backend_fault(name, torch.device("cpu")) is None]
Masks = list[int]
"""For each query row of a sequence, the rows that it sees."""

# Chunks, chains, decode rows and trees: within a tile, over two, over two splits, and from key 0 on.
CHAINS = [(80, 200), (5, 33), (1, 40), (70, 70)]
TREES = [(24, 300), (64, 130), (40, 530), (10, 10), (2, 700), (1, 65)]
CHAINS_AND_TREES = [pair for both in zip(CHAINS, TREES, strict=False) for pair in both] + TREES[len(CHAINS) :]


def make_pack(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    padding: int = 0,
    first_seed: int = 0,
    trees: bool = False,
    **shape: Any,
) -> Step:
    """Make a step of sequences of (query_len, context_len). Sequence s has the numbers of seed
    `first_seed` + s, whatever else is in the step. With `trees`, those in `TREES` are trees.
    """
    sequences = tuple(
        Sequence(*pair, seed, tree=trees and pair in TREES) for seed, pair in enumerate(lengths, first_seed)
    )
    sizes: dict[str, Any] = {"group": heads // kv_heads, "key_dim": head_dim, "value_dim": head_dim}
    return Step.of(Case(Shape(kv_heads=kv_heads, **sizes, **shape), Options(), sequences, padding))


def run(
    backend: str,
    pack: Step,
    *,
    scale: float = 0.125,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    cls, _ = select_backend(pack.layer.keys.device, pack.rows.dtype, backend)
    attention = cls([pack.layer], rows=pack.rows)
    attention.plan(pack.metadata)
    attention.begin_step(pack.metadata)
    return attention.forward(0, *pack.new, AttentionOptions(scale, window or 0, softcap or 0.0, sinks))


def part_of(pack: Step, rows: slice, context_len: int) -> Step:
    """Return a step of some rows of a pack of one sequence, which then has this many keys."""
    count = rows.stop - rows.start
    metadata = AttentionMetadata(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_len=torch.tensor([context_len], dtype=torch.int32),
        block_table=pack.metadata.block_table,
        slot_mapping=pack.metadata.slot_mapping[rows],
        max_query_len=count,
        max_context_len=context_len,
        query_lens=[count],
    )
    query, key, value = (each[rows] for each in pack.new)
    return replace(pack, metadata=metadata, new=(query, key, value))


def tree_masks(num_rows: int, seed: int) -> Masks:
    """Return the masks of a random tree: each row sees its parent's rows and itself."""
    rng = random.Random(seed)
    masks = [1]
    for row in range(1, num_rows):
        masks.append(masks[rng.randrange(max(0, row - 9), row)] | 1 << row)
    return masks


def chain_masks(num_rows: int) -> Masks:
    return [(2 << row) - 1 for row in range(num_rows)]


def with_masks(pack: Step, masks: list[Masks | None], earlier: int = 0) -> Step:
    """Return the pack with these masks of its query rows. Trees begin `earlier` keys before the
    query rows.
    """
    counts = pack.metadata.query_start.diff().tolist()
    flat = [mask for count, each in zip(counts, masks, strict=True) for mask in each or [0] * count]
    flat += [0] * (len(pack.metadata.slot_mapping) - len(flat))
    visible = torch.tensor([mask - (mask >> 63 << 64) for mask in flat], dtype=torch.int64)
    firsts = pack.metadata.context_len.tolist()
    starts = [
        -1 if each is None else context_len - count - earlier
        for context_len, count, each in zip(firsts, counts, masks, strict=True)
    ]
    tree_start = torch.tensor(starts, dtype=torch.int32)
    return replace(pack, metadata=replace(pack.metadata, visible=visible, tree_start=tree_start))


def with_first_keys(pack: Step, first_keys: list[int]) -> Step:
    first_key = torch.tensor(first_keys, dtype=torch.int32)
    return replace(pack, metadata=replace(pack.metadata, first_key=first_key))


def reference(
    pack: Step,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of each sequence in float64, from the pool's keys and values and the new ones.
    Quantized rows count as their decoded values.
    """
    exact, told = pack.in_float64(), pack.metadata
    query, *new = exact.new
    out = torch.zeros(*query.shape[:2], new[1].shape[2], dtype=torch.float64)
    for s, (start, end) in enumerate(pairwise(told.query_start.tolist())):
        context_len, block_size = int(told.context_len[s]), exact.layer.keys.shape[1]
        base = context_len - (end - start)
        places = torch.arange(base)
        blocks = told.block_table[s, places // block_size].long()
        k, v = (
            torch.cat([side[blocks, places % block_size], rows[start:end]])
            for side, rows in zip((exact.layer.keys, exact.layer.values), new, strict=True)
        )
        masks = chain_masks(end - start)
        if told.visible is not None and told.tree_start is not None and told.tree_start[s] >= 0:
            assert told.tree_start[s] == base
            masks = [mask % (1 << 64) for mask in told.visible[start:end].tolist()]
        own = torch.tensor([base + mask.bit_count() - 1 for mask in masks])
        among = torch.tensor([[mask >> i & 1 for i in range(end - start)] for mask in masks])
        seen = torch.cat([torch.ones(end - start, base, dtype=torch.bool), among.bool()], dim=1)
        if told.first_key is not None:
            seen &= torch.arange(context_len) >= told.first_key[s]
        if window:
            seen &= torch.cat([places, own]) > own[:, None] - window
        k, v = (side.repeat_interleave(query.shape[1] // side.shape[1], dim=1) for side in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query[start:end], k) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            of_sinks = sinks.double()[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat([scores, of_sinks], dim=2)
        weights = scores.softmax(-1)[..., :context_len].masked_fill(~seen, 0)  # a row may see nothing
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return out
