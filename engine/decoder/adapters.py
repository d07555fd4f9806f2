"""Adapters as the native decoder reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import numpy as np

from engine.decoder.structs import RowsArgs
from engine.lora.structs import PartArgs
from engine.lora.table import Adapters, Weights
from engine.rows import SequenceRows

PRODUCTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""A layer's, in the order of `structs.h`; linear layers that are one product lie side by side in its rows."""


class NativeAdapters:
    """Of a decoder with so many layers."""

    def __init__(self, adapters: Adapters, num_layers: int) -> None:
        self._adapters = adapters
        self._num_layers = num_layers
        self._parts: WeakKeyDictionary[Weights, ctypes.Array[PartArgs]] = WeakKeyDictionary()

    def place(self, batch: Sequence[SequenceRows], fields: RowsArgs) -> object:
        """Say in `fields` which row has which adapter. Whoever calls keeps what is returned, as they point
        to it.
        """
        slots = list(dict.fromkeys(rows.adapter for rows in batch if rows.adapter))
        if not slots:
            return None
        places = {slot: place for place, slot in enumerate(slots)} | {0: -1}
        counts = [len(rows.token_ids) for rows in batch]
        owners = np.repeat(np.array([places[rows.adapter] for rows in batch], np.int32), counts)
        parts = [self._parts_of(self._adapters.weights(slot)) for slot in slots]
        pointers = (ctypes.c_void_p * len(parts))(*(ctypes.addressof(each) for each in parts))
        fields.owners, fields.num_adapters = owners.ctypes.data, len(parts)
        fields.adapters = ctypes.addressof(pointers)
        return owners, pointers, parts

    def _parts_of(self, weights: Weights) -> ctypes.Array[PartArgs]:
        if weights not in self._parts:
            parts = [*self._layers(weights)]
            self._parts[weights] = (PartArgs * len(parts))(*parts)
        return self._parts[weights]

    def _layers(self, weights: Weights) -> Iterator[PartArgs]:
        for layer in range(self._num_layers):
            for names in PRODUCTS:
                first = 0
                for name in names:
                    path = f"model.layers.{layer}.{name}"
                    yield _part(weights, path, first)
                    first += self._adapters.linears[path].outputs


def _part(weights: Weights, path: str, first: int) -> PartArgs:
    product = weights.products.get(path)
    if product is None:
        return PartArgs()
    (rank, inputs), outputs = product.down.shape, product.up.shape[1]
    return PartArgs(product.down.data_ptr(), product.up.data_ptr(), rank, inputs, outputs, first)
