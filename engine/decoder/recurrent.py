"""The states of recurrent layers as the native decoder reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from engine.decoder.structs import ModelArgs, RowsArgs
from engine.recurrent.native import CpuSpans, kernel_addresses, layer_seats
from engine.recurrent.seats import Seats
from engine.rows import SequenceRows, span_of


class NativeSeats:
    """Raises BuildError where the kernel cannot be built."""

    def __init__(self, seats: Seats, model: ModelArgs) -> None:
        self._layers = layer_seats(seats)
        self._spans = CpuSpans(seats)
        model.seats = ctypes.addressof(self._layers)
        model.convolve, model.attend_linear = kernel_addresses()

    def place(self, batch: Sequence[SequenceRows], fields: RowsArgs) -> None:
        """Say in `fields` where the rows' states are. It is valid until the next call."""
        self._spans.begin(map(span_of, batch))
        fields.spans = ctypes.addressof(self._spans.args)
