"""The interface between the batch runner and the attention backends.

A step runs one packed forward: decode rows, verify rows and prefill chunks of all sequences, one sequence
after the other. `AttentionMetadata` says which rows belong to which sequence and where their keys and values
are in the pool. It is built once per step; every layer uses it.
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
    """The rows of one packed forward, and the places of their keys and values in the pool.

    Row j of a sequence with q query rows has key context_len - q + j.
    """

    query_start: Tensor
    """int32 [num_seqs + 1]: sequence s owns the packed rows query_start[s]:query_start[s + 1]."""
    context_len: Tensor
    """int32 [num_seqs]: tokens in the KV cache, this step's query tokens included."""
    block_table: Tensor
    """int32 [num_seqs, max_blocks]: block ids in order of position; rows are padded with 0."""
    slot_mapping: Tensor
    """int64 [total_tokens]: the slot, block id * block_size + offset, of a row's key and value. -1 marks a
    padding row: nothing is written and the output is zero. Rows past query_start[-1] must be padding."""
    max_query_len: int
    max_context_len: int
    visible: Tensor | None = None
    """int64 [total_tokens], None without trees. Bit i of a tree row's mask is set if the row sees key
    `tree_start` + i of its sequence. The set bits are the row's path in the tree; the highest is the row
    itself. So its position is `tree_start` plus the number of set bits less one, and a sliding window keeps
    the last keys of the path. A row sees all keys before `tree_start`. Masks of chains are ignored."""
    tree_start: Tensor | None = None
    """int32 [num_seqs], with `visible`: each tree's first key, or -1 for a chain. It is at most the first
    query row's key, and the tree has at most 64 keys."""
    first_key: Tensor | None = None
    """int32 [num_seqs]: rows see no key before this one. It is at most the first query row's key. None: 0."""
    query_lens: Sequence[int] = ()
    """Query rows of each sequence without padding, on the host, for `AttentionBackend.plan`."""


class LayerKv(NamedTuple):
    """A layer's part of a pool: two views [num_blocks, block_size, num_kv_heads, head_dim], which may differ
    in head_dim. Coded rows also have scales, views float32 [num_blocks, block_size, num_kv_heads].
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @classmethod
    def of(cls, both: Tensor, scales: Tensor | None = None) -> LayerKv:
        """Make the part from views of keys and values together, [num_blocks, 2, ...]."""
        return cls(*both.unbind(1), *((None, None) if scales is None else scales.unbind(1)))

    @classmethod
    def of_sides(cls, keys: StoredRows, values: StoredRows) -> LayerKv:
        return cls(keys.values, values.values, keys.scales, values.scales)

    def fits(self, rows: KvRows) -> bool:
        has_scales = self.key_scales is not None and self.value_scales is not None
        return self.keys.dtype is rows.stored_dtype and has_scales is rows.coded

    @property
    def sides(self) -> tuple[StoredRows, StoredRows]:
        """The keys with their scales, and the values with theirs."""
        return StoredRows(self.keys, self.key_scales), StoredRows(self.values, self.value_scales)

    def of_heads(self, heads: slice) -> LayerKv:
        return LayerKv.of_sides(*(side.part(slice(None), slice(None), heads) for side in self.sides))

    @property
    def values_in_keys(self) -> bool:
        """Whether each value is the beginning of its key, so that writing keys writes the values."""
        is_same = self.values.untyped_storage() is self.keys.untyped_storage()
        return is_same and self.values.storage_offset() == self.keys.storage_offset()


class AttentionOptions(NamedTuple):
    """Options of a layer's attention. `sinks`, floats [num_heads], are one more score per head, for a key
    that all rows see and whose value is zero: a sink adds to the softmax's denominator only, and is neither
    scaled nor capped.
    """

    scale: float
    window: int = 0
    """Sliding window: with window w, position p sees the positions in (p - w, p]; 0: no window."""
    softcap: float = 0.0
    """Soft cap: cap c turns a score s into c * tanh(s / c); 0: no cap."""
    sinks: Tensor | None = None


def check_rows(
    query: Tensor, key: Tensor, value: Tensor, num_rows: int, dims: tuple[int, int, int], rows: KvRows
) -> None:
    """Raise ValueError for rows that a kernel would read or write out of bounds. `dims` are the layer's
    number of KV heads, key size and value size.
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
    """Attention over the layers of a pool. Layers share the blocks and may differ in shape."""

    name: str
    block_size: int
    num_tables: int = 1
    """Number of block tables. With several, the metadata have one more dimension (`TablesBackend`)."""
    can_capture: bool = False
    """Whether graphs can capture the launches: a `CapturableBackend`, or one for each block table."""
    deterministic: bool = True
    """Whether a row's output has the same bits in every batch."""
    is_causal: bool = True
    """Whether rows of chains see no later rows. Other backends get `begin_step` before every step."""

    @abstractmethod
    def __init__(self, layers: Sequence[LayerKv], rows: KvRows | None = None) -> None:
        """Attend over `layers`. `rows`: the stored format, if it is not the model's own dtype."""

    @classmethod
    def fault(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why the backend cannot serve this device and dtype; None if it can."""
        return None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Plan the coming step on the host. A runner calls this before each step. Before a step that a graph
        replays, it calls nothing else.
        """
        return

    @abstractmethod
    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare the data that all layers of the coming step share. A graph may capture this."""

    @abstractmethod
    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Write key and value to the pool, then attend.

        query is [total_tokens, num_heads, key_dim], key [total_tokens, num_kv_heads, key_dim] and value
        [total_tokens, num_kv_heads, value_dim], all of the rows' dtype and with any strides. `value` is not
        read if the pool's values are parts of its keys (`LayerKv.values_in_keys`).
        Return a new contiguous tensor [total_tokens, num_heads, value_dim] of the query's dtype.
        """


class NativeBackend(AttentionBackend):
    """A backend whose kernel the native decoder calls directly."""

    parallel: int
    """The address of the function that runs work on several threads (native/parallel.h)."""

    @property
    @abstractmethod
    def addresses(self) -> tuple[int, int, int]:
        """Addresses of the kernel's state, and of its functions that begin a step and attend."""


class WrittenLayer(Protocol):
    """A layer's part of the pool, in the form in which kernels write it."""

    pool: tuple[Tensor, Tensor | None, Tensor, Tensor | None]
    """Keys, key scales, values and value scales."""
    strides: list[int]
    """The strides of blocks, tokens and heads of the keys, then of the values."""
    block_size: int
    is_fp8: bool


class CapturableBackend(AttentionBackend):
    """A backend whose launches graphs can capture. The CUDA decoder writes keys and values to `layers` itself
    and then calls `attend`.
    """

    can_capture = True
    layers: Sequence[WrittenLayer]

    @abstractmethod
    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attend like `forward`, for rows whose keys and values are in the pool already. The output of
        padding rows is undefined.
        """
