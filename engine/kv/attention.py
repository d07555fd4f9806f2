"""The contract between the batch runner and the attention backends.

A step runs one packed forward: the query rows of all its sequences lie one after another, be they decode
rows, rows to verify or chunks of prompts. `AttentionMetadata` says which rows belong to which sequence
and where their keys and values lie in the pool; it is built once a step and used by every layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from engine.kv.row_codes import KvRows, StoredRows


@dataclass
class AttentionMetadata:
    """One packed forward, and where its keys and values lie in the pool.

    Row j of a sequence with q query rows has key context_len - q + j.
    """

    query_start: Tensor
    """int32 [num_seqs + 1]: sequence s owns the packed rows query_start[s]:query_start[s + 1]."""
    context_len: Tensor
    """int32 [num_seqs]: tokens in the KV cache, this step's query tokens included."""
    block_table: Tensor
    """int32 [num_seqs, max_blocks]: block ids in order of position; rows are padded with 0."""
    slot_mapping: Tensor
    """int64 [total_tokens]: block id * block_size + offset where a row's key and value go. -1 marks a padding
    row, for which nothing is written and the output is zero. Rows past query_start[-1] must be padding."""
    max_query_len: int
    max_context_len: int
    visible: Tensor | None = None
    """int64 [total_tokens], None without trees. Bit i of a tree row's mask is set if the row sees key
    `tree_start` + i of its sequence. The set bits are the row's path in the tree, and the last one is the row
    itself. So its position is `tree_start` plus the number of set bits less one, and a sliding window keeps
    the last keys of the path. A row sees all keys before `tree_start`. Masks of chains are ignored."""
    tree_start: Tensor | None = None
    """int32 [num_seqs], with `visible`: each tree's first key, or -1 for a chain. It is at most the first
    query row's key, and the tree has at most 64 keys."""
    first_key: Tensor | None = None
    """int32 [num_seqs]: no row sees keys before this one. At most the first query row's key. None: all 0."""
    query_lens: Sequence[int] = ()
    """Query rows of each sequence, on the host, for `AttentionBackend.plan`; padding sequences are left out.
    """


class LayerKv(NamedTuple):
    """A layer's part of a pool: two views [num_blocks, block_size, num_kv_heads, head_dim], which may differ
    in head_dim. Of coded rows there are scales, float32 [num_blocks, block_size, num_kv_heads], in the same
    rows of heads.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def of(cls, both: Tensor, scales: Tensor | None = None) -> LayerKv:
        """The parts of views of both, [num_blocks, 2, ...]."""
        return cls(*both.unbind(1), *((None, None) if scales is None else scales.unbind(1)))

    @classmethod
    def of_sides(cls, keys: StoredRows, values: StoredRows) -> LayerKv:
        """The inverse of `sides`."""
        return cls(keys.values, values.values, keys.scales, values.scales)

    def fits(self, rows: KvRows) -> bool:
        """Whether its rows have this format."""
        has_scales = self.key_scales is not None and self.value_scales is not None
        return self.keys.dtype is rows.stored_dtype and has_scales is rows.coded

    @property
    def sides(self) -> tuple[StoredRows, StoredRows]:
        """The keys, and the values."""
        return StoredRows(self.keys, self.key_scales), StoredRows(self.values, self.value_scales)

    def of_heads(self, heads: slice) -> LayerKv:
        """The part of some KV heads."""
        return LayerKv.of_sides(*(side.part(slice(None), slice(None), heads) for side in self.sides))

    @property
    def values_in_keys(self) -> bool:
        """Values are the first ones of each row of keys: written with these, and never alone."""
        is_same = self.values.untyped_storage() is self.keys.untyped_storage()
        return is_same and self.values.storage_offset() == self.keys.storage_offset()


class AttentionOptions(NamedTuple):
    """How a layer attends. `sinks`, floats [num_heads], are one more score per head, of a key that all rows
    see and whose value is zero: it only adds to the softmax's denominator, and is neither scaled nor capped.
    """

    scale: float
    window: int = 0
    """With a sliding window w position p sees the positions in (p - w, p]; 0: none."""
    softcap: float = 0.0
    """A soft cap c turns a score s into c * tanh(s / c); 0: none."""
    sinks: Tensor | None = None


def check_rows(
    query: Tensor, key: Tensor, value: Tensor, num_rows: int, dims: tuple[int, int, int], rows: KvRows
) -> None:
    """Raise ValueError for rows that a kernel would read or write out of bounds. `dims` are a layer's number
    of KV heads and the sizes of their keys and values.
    """
    kv_heads, key_dim, value_dim = dims
    keys, values = (num_rows, kv_heads, key_dim), (num_rows, kv_heads, value_dim)
    if key.shape != keys or value.shape != values:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} are not {keys} and {values}")
    if query.shape[::2] != keys[::2] or query.shape[1] % kv_heads:
        raise ValueError(f"query {tuple(query.shape)} does not fit keys {keys}")
    if not query.dtype is key.dtype is value.dtype is rows.dtype:
        raise ValueError(f"query, key and value must be of the pool's {rows.dtype}")


class AttentionBackend(ABC):
    """Attends over the layers of a pool, each with shapes of its own and the same blocks."""

    name: str
    block_size: int
    num_tables: int = 1
    """With more than one block table, the metadata have one dimension more (`TablesBackend`)."""
    can_capture: bool = False
    """Whether graphs can capture its launches: a `CapturableBackend`, or one for each block table."""
    deterministic: bool = True
    """Whether a row has the same bits in every batch."""
    is_causal: bool = True
    """Whether rows of chains see no later ones. Steps of other backends always go through `begin_step`."""

    @abstractmethod
    def __init__(self, layers: Sequence[LayerKv], rows: KvRows | None = None) -> None:
        """`rows` says how keys and values are stored if not as the model computes them."""

    @classmethod
    def fault(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Tell why it can't serve this device and dtype; None if it can."""
        return None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Plan the coming step on the host. A runner calls it before each step, also before one that a graph
        replays, which calls nothing else.
        """
        return

    @abstractmethod
    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of the coming step share. A graph may capture it."""

    @abstractmethod
    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Write key and value into the pool, then attend.

        query is [total_tokens, num_heads, key_dim], key [total_tokens, num_kv_heads, key_dim] and value
        [total_tokens, num_kv_heads, value_dim], all of the rows' dtype and with any strides. Where the pool's
        values lie in its keys, `value` is not read.
        Returns a new contiguous tensor [total_tokens, num_heads, value_dim] of the query's dtype.
        """


class NativeBackend(AttentionBackend):
    """A backend whose kernel the native decoder calls itself."""

    parallel: int
    """The address of the function that runs work on several threads (native/parallel.h)."""

    @property
    @abstractmethod
    def addresses(self) -> tuple[int, int, int]:
        """The kernel's state, and its functions that begin a step and attend."""


class WrittenLayer(Protocol):
    """A layer's part of the pool, as kernels write it."""

    pool: tuple[Tensor, Tensor | None, Tensor, Tensor | None]
    """Keys, their scales, values and theirs."""
    strides: list[int]
    """The strides of blocks, tokens and heads of the keys, then of the values."""
    block_size: int
    is_fp8: bool


class CapturableBackend(AttentionBackend):
    """A backend whose launches graphs can capture. The CUDA decoder writes keys and values to its `layers`
    itself, and then has it `attend`.
    """

    can_capture = True
    layers: Sequence[WrittenLayer]

    @abstractmethod
    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """As `forward` where the pool has the rows' keys and values already. What padding rows get means
        nothing.
        """
