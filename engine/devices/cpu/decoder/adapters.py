"""Adapters in the native decoder's structs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from engine.batch.rows import SequenceRows
from engine.devices.cpu.decoder.native_model import LayerPaths
from engine.devices.cpu.decoder.structs import RowsArgs
from engine.lora.packed import PackedProduct, PartArgs
from engine.lora.table import Adapters, Weights

_ROOM = 3, 2, 1, 2, 1, 1
"""Number of parts of each of a layer's products, in the order of `structs.h`."""


class _Placed(NamedTuple):
    """A batch's sequences as (slot, rows), with the arrays that the decoder reads."""

    owned: list[tuple[int, int]]
    owners: np.ndarray
    parts: list[ctypes.Array[PartArgs]]
    pointers: Any


class NativeAdapters:
    """The adapters of a decoder with linear layers at these `paths`. `columns` are the outputs that it
    computes of some layers; of the other layers it computes all outputs.
    """

    def __init__(self, adapters: Adapters, paths: Sequence[LayerPaths], columns: Mapping[str, range]) -> None:
        self._adapters = adapters
        self._paths = paths
        self._columns = columns
        self._parts: WeakKeyDictionary[Weights, ctypes.Array[PartArgs]] = WeakKeyDictionary()
        self._placed = _Placed([], np.empty(0, np.int32), [], None)

    def place(self, batch: Sequence[SequenceRows], fields: RowsArgs) -> None:
        """Write the rows' adapters to `fields`. The arrays are valid until the next call."""
        owned = [(rows.adapter, len(rows.token_ids)) for rows in batch]
        if owned != self._placed.owned:  # a decoding batch stays the same for many steps
            self._placed = self._place(owned)
        _, owners, parts, pointers = self._placed
        if parts:
            fields.owners, fields.num_adapters = owners.ctypes.data, len(parts)
            fields.adapters = ctypes.addressof(pointers)

    def _place(self, owned: list[tuple[int, int]]) -> _Placed:
        slots, counts = zip(*owned, strict=True)
        places = {slot: place for place, slot in enumerate(dict.fromkeys(filter(None, slots)))}
        owners = np.repeat(np.array([places.get(slot, -1) for slot in slots], np.int32), counts)
        parts = [self._parts_of(self._adapters.weights(slot)) for slot in places]
        pointers = (ctypes.c_void_p * len(parts))(*map(ctypes.addressof, parts))
        return _Placed(owned, owners, parts, pointers)

    def _parts_of(self, weights: Weights) -> ctypes.Array[PartArgs]:
        if weights not in self._parts:
            parts = [*self._layers(weights)]
            self._parts[weights] = (PartArgs * len(parts))(*parts)
        return self._parts[weights]

    def _layers(self, weights: Weights) -> Iterator[PartArgs]:
        for layer in self._paths:
            for paths, room in zip(layer, _ROOM, strict=True):
                first = 0
                for path in paths:
                    own = self._columns.get(path, range(self._adapters.linears[path].outputs))
                    yield _part(weights, path, own, first)
                    first += len(own)
                yield from (PartArgs() for _ in range(room - len(paths)))


def _part(weights: Weights, path: str, outputs: range, first: int) -> PartArgs:
    product = weights.products.get(path)
    return product.part(outputs, first) if isinstance(product, PackedProduct) else PartArgs()
