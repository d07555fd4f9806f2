"""The states of recurrent layers as the native decoder reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from engine.decoder.structs import ModelArgs, RowsArgs
from engine.recurrent.native import CpuSpans, kernel_addresses, layer_seats
from engine.recurrent.seats import Seats
from engine.rows import SequenceRows


class NativeSeats:
    """Raises BuildError where the kernel cannot be built."""

    def __init__(self, seats: Seats, model: ModelArgs) -> None:
        self._layers = layer_seats(seats)
        self._spans = CpuSpans(seats)
        model.seats = ctypes.addressof(self._layers)
        model.convolve, model.attend_linear = kernel_addresses()

    def place(self, batch: Sequence[SequenceRows], fields: RowsArgs) -> None:
        """Say in `fields` where the rows' states are. It is valid until the next call."""
        spans = self._spans
        spans.begin()
        for rows in batch:
            start, count = rows.start, len(rows.token_ids)
            certain = start + count if rows.certain is None else rows.certain
            tree_start = start if rows.tree_start is None else rows.tree_start
            spans.add(rows.seat, start, count, certain, tree_start, rows.masks)
        spans.end()
        fields.spans = ctypes.addressof(spans.args)
