"""The contract between the batch runner and the attention backends.

A step runs one packed forward: the query rows of all its sequences lie one after another, whatever they
are (decode rows, verify rows, prefill chunks). `AttentionMetadata` says which rows belong to which sequence
and where their keys and values lie in the pool; it is built once a step and used by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass
class AttentionMetadata:
    """One packed forward. Row j of a sequence with q query rows has key context_len - q + j."""

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
    """int64 [total_tokens], if some sequences are no chains but trees: bit i of a tree row's mask says that
    it sees key `tree_start` + i of its sequence. Those must be the path to it: other rows' keys and its own
    as the last. So it sits as many positions behind `tree_start` as it sees others of the tree, and a sliding
    window keeps the last keys of its path. All keys before `tree_start` it sees as ever. A chain's masks are
    not looked at."""
    tree_start: Tensor | None = None
    """int32 [num_seqs], with `visible`: a tree's first key, at most that of its first query row, with all of
    the tree's keys among the 64 from there on; -1 for a chain."""
    first_key: Tensor | None = None
    """int32 [num_seqs]: no row sees keys before this one, at most the first query row's. None: all 0."""


class AttentionBackend(Protocol):
    """Attends causally over a pool [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""

    name: str

    def __init__(self, pool: Tensor) -> None: ...

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of the coming step share."""
        ...

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
        out: Tensor | None = None,
    ) -> Tensor:
        """Write key and value into the pool, then attend.

        query is [total_tokens, num_heads, head_dim], key and value are
        [total_tokens, num_kv_heads, head_dim], all of the pool's dtype and with any strides.
        A sliding window w lets position p see the positions in (p - w, p]; a soft cap c turns a score s into
        c * tanh(s / c). Returns `out`, or a new contiguous tensor, of the query's shape and dtype.
        """
        ...
