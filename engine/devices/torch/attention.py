"""Attention with torch's own operators: any device and dtype, and the reference for the others.

`SdpaBackend` has chunks of prompts computed by a library's kernel over gathered KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine.devices.attention import backend_fault, backend_of, kernel_of
from engine.devices.torch.operations import capped
from engine.kv.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionOptions,
    CapturableBackend,
    LayerKv,
)
from engine.kv.row_codes import KvRows, StoredRows


@dataclass(slots=True)
class _Sequence:
    """A sequence of the step, with numbers on the host and tensors on the device."""

    first_row: int
    query_len: int
    context_len: int
    first_key: int
    blocks: Tensor
    paths: Tensor | None
    """Mask of the last n keys, the tree's, that each row sees: bool [query_len, n]. None for a chain."""

    @property
    def first_position(self) -> int:
        """The lowest position of the sequence's rows. All rows may see the keys before it."""
        return self.context_len - (self.query_len if self.paths is None else self.paths.shape[1])


class TorchBackend(AttentionBackend):
    """A backend that gathers each sequence's context and calls scaled_dot_product_attention on it."""

    name = "torch"
    deterministic = False

    def __init__(self, layers: Sequence[LayerKv], rows: KvRows | None = None) -> None:
        keys = layers[0].keys
        self._stored = rows or KvRows(keys.dtype)
        self._layers = list(layers)
        self._device = keys.device
        self.block_size = keys.shape[1]
        self._sequences: list[_Sequence] = []

    def begin_step(self, metadata: AttentionMetadata) -> None:
        starts = metadata.query_start.tolist()
        table = metadata.block_table.to(self._device)
        first_keys = [0] * len(table) if metadata.first_key is None else metadata.first_key.tolist()
        self._sequences = [
            _Sequence(
                starts[s],
                starts[s + 1] - starts[s],
                context_len,
                first_keys[s],
                table[s],
                _paths(metadata, s, slice(starts[s], starts[s + 1])),
            )
            for s, context_len in enumerate(metadata.context_len.tolist())
            if starts[s + 1] > starts[s]
        ]
        slots = metadata.slot_mapping.to(self._device)
        self._padding = slots < 0
        self._has_padding = bool(self._padding.any())
        self._rows = (slots >= 0).nonzero().squeeze(1)
        self._blocks = slots[self._rows] // self.block_size
        self._offsets = slots[self._rows] % self.block_size

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self._write(layer, key, value)
        return self.attend(layer, query, options)

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attend like `forward`, for rows whose keys and values are in the pool already."""
        out = query.new_empty((*query.shape[:2], self._layers[layer].values.shape[3]))
        for sequence in self._sequences:
            rows = slice(sequence.first_row, sequence.first_row + sequence.query_len)
            gathered, keys, values = self._gather(layer, sequence, options.window)
            q = query[rows].transpose(0, 1)
            if options.softcap or options.sinks is not None:
                mask = _visible(sequence, gathered, options.window, q.device)
                attended = _spelled_out_attention(q, keys, values, mask, options)
            else:
                attended = _attention(q, keys, values, sequence, gathered, options)
            out[rows] = attended.transpose(0, 1)
        if self._has_padding:
            out[self._padding] = 0
        return out

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self._has_padding:
            key, value = key[self._rows], value[self._rows]
        of = self._layers[layer]
        keys, values = of.sides
        self._put(keys, key)
        if not of.values_in_keys:
            self._put(values, value)

    def _put(self, pool: StoredRows, rows: Tensor) -> None:
        values, scales = self._stored.encode(rows)
        pool.values[self._blocks, self._offsets] = values
        if pool.scales is not None and scales is not None:
            pool.scales[self._blocks, self._offsets] = scales

    def _gather(self, layer: int, sequence: _Sequence, window: int) -> tuple[int, Tensor, Tensor]:
        """Return the first gathered key's position, and keys and values [num_kv_heads, keys, head_dim]."""
        size = self.block_size
        first = sequence.first_key
        if window:
            first = max(first, sequence.first_position - window + 1)
        first = first // size * size
        last = -(-sequence.context_len // size)
        blocks = sequence.blocks[first // size : last]

        def gathered(pool: StoredRows) -> Tensor:
            scales = None if pool.scales is None else pool.scales[blocks]
            rows = self._stored.decode(StoredRows(pool.values[blocks], scales)).flatten(0, 1)
            return rows[: sequence.context_len - first].transpose(0, 1)

        of = self._layers[layer]
        keys_of, values_of = of.sides
        keys = gathered(keys_of)
        values = keys[..., : of.values.shape[3]] if of.values_in_keys else gathered(values_of)
        return first, keys, values


def _paths(metadata: AttentionMetadata, s: int, rows: slice) -> Tensor | None:
    if metadata.visible is None or metadata.tree_start is None or metadata.tree_start[s] < 0:
        return None
    num_keys = int(metadata.context_len[s] - metadata.tree_start[s])
    masks = metadata.visible[rows, None]
    return (masks >> torch.arange(num_keys, device=masks.device) & 1).bool()


def _visible(sequence: _Sequence, gathered: int, window: int, device: torch.device) -> Tensor:
    """Return which keys, from `gathered` on, each query row may see: bool [query_len, keys]."""
    paths = sequence.paths
    if paths is None:
        paths = torch.ones(sequence.query_len, sequence.query_len, dtype=torch.bool, device=device).tril()
    keys = torch.arange(gathered, sequence.first_position, device=device)
    before = (keys >= sequence.first_key).expand(len(paths), -1)
    if window:
        positions = sequence.first_position - 1 + paths.sum(1, keepdim=True)
        before = before & (keys > positions - window)
        paths = paths & (paths.flip(1).cumsum(1).flip(1) <= window)
    return torch.cat([before, paths], dim=1)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, sequence: _Sequence, gathered: int, options: AttentionOptions
) -> Tensor:
    """Attend with q [num_heads, query_len, key_dim] to k [num_kv_heads, keys, key_dim] and v [num_kv_heads,
    keys, value_dim]. Return [num_heads, query_len, value_dim].
    """
    kv_heads, window, scale = k.shape[0], options.window, options.scale
    has_edge = gathered < sequence.first_key or (window and k.shape[1] > window)
    if sequence.query_len == 1 and sequence.paths is None and not has_edge:
        grouped = q.reshape(1, kv_heads, -1, q.shape[-1])
        attended = scaled_dot_product_attention(grouped, k[None], v[None], scale=scale)
        return attended.reshape(q.shape[0], 1, -1)
    causal = sequence.paths is None and not has_edge and sequence.query_len == sequence.context_len
    mask = None if causal else _visible(sequence, gathered, window, q.device)
    gqa = q.shape[0] != kv_heads
    attended = scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa
    )
    return attended[0]


def _spelled_out_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend in float32 or wider with capped scores or sinks, which SDPA does not support."""
    heads, query_len, head_dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).reshape(k.shape[0], -1, head_dim)
    scores = capped(grouped @ k.to(wide).transpose(1, 2) * options.scale, options.softcap)
    scores = scores.view(heads, query_len, -1).masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        scores = torch.cat([scores, options.sinks.to(wide)[:, None, None].expand(-1, query_len, 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[1]].reshape(k.shape[0], -1, k.shape[1])
    return (weights @ v.to(wide)).view(heads, query_len, -1).to(q.dtype)


LEAST_ROWS = 65
"""Fewest rows of a prefill chunk; a sequence with fewer rows may be a draft to verify."""


class SdpaBackend(CapturableBackend):
    """A backend that splits a step with prefill chunks: the device's kernel attends for all other rows, for
    steps with trees, and for steps that graphs replay, which have no chunks.
    """

    name = "sdpa"
    deterministic = False

    def __init__(self, layers: Sequence[LayerKv], rows: KvRows | None = None) -> None:
        self._kernel = backend_of(kernel_of(layers[0].keys.device))(layers, rows)
        self.can_capture = self._kernel.can_capture
        if isinstance(self._kernel, CapturableBackend):
            self.layers = self._kernel.layers
        self._chunks = TorchBackend(layers, rows)
        self.block_size = self._kernel.block_size
        self._value_dims = [layer.values.shape[3] for layer in layers]
        self._chunked: list[int] = []
        """The step's sequences with chunks."""
        self._query_lens: Sequence[int] = ()
        self._parts: list[tuple[AttentionBackend, Tensor]] = []
        """Each backend and its rows, in a step with chunks."""

    @classmethod
    def fault(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        return backend_fault(kernel_of(device), device, dtype)

    def plan(self, metadata: AttentionMetadata) -> None:
        self._query_lens = metadata.query_lens
        has_trees = metadata.visible is not None
        chunks = (s for s, count in enumerate(metadata.query_lens) if count >= LEAST_ROWS)
        self._chunked = [] if has_trees else list(chunks)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._parts = []
        if not self._chunked:
            self._kernel.begin_step(metadata)
            return
        starts = [*accumulate(self._query_lens, initial=0)]
        others = [s for s in range(len(self._query_lens)) if s not in self._chunked]
        padding = range(starts[-1], len(metadata.slot_mapping))
        for backend, sequences, rest in ((self._chunks, self._chunked, ()), (self._kernel, others, padding)):
            rows = [row for s in sequences for row in range(starts[s], starts[s + 1])] + [*rest]
            if rows:
                part, taken = _part(metadata, sequences, rows, [self._query_lens[s] for s in sequences])
                backend.begin_step(part)
                self._parts.append((backend, taken))

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if not self._parts:
            return self._kernel.forward(layer, query, key, value, options)
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        for backend, rows in self._parts:
            out[rows] = backend.forward(layer, query[rows], key[rows], value[rows], options)
        return out

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        if not self._parts:
            return _attending(self._kernel).attend(layer, query, options)
        out = query.new_empty((*query.shape[:2], self._value_dims[layer]))
        for backend, rows in self._parts:
            out[rows] = _attending(backend).attend(layer, query[rows], options)
        return out


def _attending(backend: AttentionBackend) -> CapturableBackend | TorchBackend:
    assert isinstance(backend, CapturableBackend | TorchBackend)
    return backend


def _part(
    metadata: AttentionMetadata, sequences: Sequence[int], rows: Sequence[int], query_lens: Sequence[int]
) -> tuple[AttentionMetadata, Tensor]:
    """Return the metadata of some sequences followed by padding, and the indices of their rows."""
    device = metadata.slot_mapping.device
    taken, own = (torch.tensor(each, dtype=torch.int64, device=device) for each in (rows, sequences))
    starts = torch.tensor([*accumulate(query_lens, initial=0)], dtype=torch.int32, device=device)
    part = AttentionMetadata(
        query_start=starts,
        context_len=metadata.context_len[own],
        block_table=metadata.block_table[own],
        slot_mapping=metadata.slot_mapping[taken],
        max_query_len=max(query_lens, default=0),
        max_context_len=metadata.max_context_len,
        first_key=None if metadata.first_key is None else metadata.first_key[own],
    )
    return part, taken
