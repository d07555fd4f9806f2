"""The states of recurrent layers as the native decoder reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from engine.batch.rows import SequenceRows, span_of
from engine.devices.cpu.decoder.structs import ModelArgs, RowsArgs
from engine.devices.cpu.recurrent.native import CpuSpans, kernel_addresses, layer_state_slots
from engine.kv.state_slots import StateSlots


class NativeStateSlots:
    """Raises BuildError where the kernel cannot be built."""

    def __init__(self, state_slots: StateSlots, model: ModelArgs) -> None:
        self._layers = layer_state_slots(state_slots)
        self._spans = CpuSpans(state_slots)
        model.state_slots = ctypes.addressof(self._layers)
        model.convolve, model.attend_linear = kernel_addresses()

    def place(self, batch: Sequence[SequenceRows], fields: RowsArgs) -> None:
        """Say in `fields` where the rows' states are. It is valid until the next call."""
        self._spans.begin(map(span_of, batch))
        fields.spans = ctypes.addressof(self._spans.args)
