"""Prefill chunks by a library kernel: torch's scaled_dot_product_attention over gathered KV."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engine.devices.attention import backend_fault, backend_of, kernel_of
from engine.devices.torch.attention import TorchBackend
from engine.kv.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionOptions,
    CapturableBackend,
    LayerKv,
)
from engine.kv.row_codes import KvRows

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
