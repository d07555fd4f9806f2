"""Attention by FlashAttention-3 for chunks of prompts, and by our kernels for all other rows.

It reads blocks in place, as our kernels do, and never splits a row's keys. A row's bits still differ from
those of our kernels, which attend for decode rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.devices.cuda.attention import tiles
from engine.devices.cuda.attention.backend import PoolLayer, TritonBackend
from engine.devices.cuda.library_products import FLASH, library_fault, passes
from engine.kv.attention import AttentionMetadata, AttentionOptions, LayerKv
from engine.kv.row_codes import KvRows

_LARGEST_DIM, _DIMS_MULTIPLE = 256, 8


class _Chunks(NamedTuple):
    """Chunks of adjacent sequences: their rows, and what the library reads of them."""

    rows: slice
    starts: Tensor
    contexts: Tensor
    blocks: Tensor
    longest: int


class FlashBackend(TritonBackend):
    """The Triton backend, with chunks of prompts by FlashAttention-3 if keys and values are uncoded and of a
    size that it takes, and there are neither sinks nor first keys.
    """

    name = "flash"
    deterministic = False

    @classmethod
    def fault(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return library_fault(FLASH, device, dtype) or super().fault(device, dtype)

    def __init__(self, layers: Sequence[LayerKv], rows: KvRows | None = None) -> None:
        super().__init__(layers, rows)
        device, dtype = layers[0].keys.device, self._rows.dtype
        dims = {of.dims for of in self.layers}
        self._taken = {each for each in dims if self._takes(each) and _passes(each[0], device, dtype)}
        self._query_lens: Sequence[int] = ()
        self._chunks: list[_Chunks] = []

    def _takes(self, dims: tuple[int, int]) -> bool:
        key_dim, value_dim = dims
        fits = key_dim == value_dim <= _LARGEST_DIM and key_dim % _DIMS_MULTIPLE == 0
        return fits and not self._rows.coded

    def plan(self, metadata: AttentionMetadata) -> None:
        self._query_lens = metadata.query_lens

    def begin_step(self, metadata: AttentionMetadata) -> None:
        super().begin_step(metadata)
        lens, self._query_lens = self._query_lens, ()
        self._chunks = [] if metadata.first_key is not None else _chunks_of(metadata, lens)

    def _attend(
        self, chunk: bool, of: PoolLayer, query: Tensor, out: Tensor, options: AttentionOptions
    ) -> None:
        if not chunk or not self._chunks or of.dims not in self._taken or options.sinks is not None:
            super()._attend(chunk, of, query, out, options)
            return
        for chunks in self._chunks:
            out[chunks.rows] = _attended(query, of.pool[0], of.pool[2], chunks, options)


def _chunks_of(metadata: AttentionMetadata, query_lens: Sequence[int]) -> list[_Chunks]:
    """Return the step's chunks, those of adjacent sequences together."""
    found, row = [], 0
    numbered = groupby(enumerate(query_lens), lambda each: each[1] >= tiles.CHUNK)
    for are_chunks, run in numbered:
        own = [*run]
        lens = [count for _, count in own]
        first, end, first_row = own[0][0], own[-1][0] + 1, row
        row += sum(lens)
        if are_chunks:
            found.append(
                _Chunks(
                    slice(first_row, row),
                    metadata.query_start[first : end + 1] - first_row,
                    metadata.context_len[first:end],
                    metadata.block_table[first:end],
                    max(lens),
                )
            )
    return found


@cache
def _flash() -> Any:
    return importlib.import_module(FLASH.package).flash_attn_with_kvcache


def _attended(
    query: Tensor, keys: Tensor, values: Tensor, chunks: _Chunks, options: AttentionOptions
) -> Tensor:
    attended: Tensor = _flash()(
        query[chunks.rows],
        keys,
        values,
        cache_seqlens=chunks.contexts,
        page_table=chunks.blocks,
        cu_seqlens_q=chunks.starts,
        max_seqlen_q=chunks.longest,
        softmax_scale=options.scale,
        causal=True,
        window_size=(options.window - 1, 0) if options.window else (-1, -1),
        softcap=options.softcap,
        num_splits=1,
    )
    return attended


@cache
def _passes(dim: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Try the library with a chunk of one sequence, in blocks that are not adjacent."""

    def trial() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        rows, keys, page, heads = 70, 112, 16, 2
        pool = torch.randn(keys // page, 2, page, 1, dim, generator=generator).to(device, dtype)
        query = torch.randn(rows, heads, dim, generator=generator).to(device, dtype)
        blocks = torch.randperm(len(pool), generator=generator).int().to(device)
        starts, contexts = (torch.tensor(each).int().to(device) for each in ([0, rows], [keys]))
        chunks = _Chunks(slice(0, rows), starts, contexts, blocks[None], rows)
        found = _attended(query, pool[:, 0], pool[:, 1], chunks, AttentionOptions(dim**-0.5))
        k, v = (pool[blocks.long(), side].flatten(0, 2).float() for side in range(2))
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=device).triu(keys - rows + 1)
        scores = (query.float().transpose(0, 1) @ k.T * dim**-0.5).masked_fill(hidden, -torch.inf)
        return found, (scores.softmax(-1) @ v).transpose(0, 1)

    return passes(FLASH, trial)
