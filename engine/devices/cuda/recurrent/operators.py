"""The host's side of the Triton kernels of recurrent layers: launches, without reads from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from engine.batch.recurrent_plan import Room, Tables, padded, tables_of, tile_rows
from engine.batch.runner import StepOperators
from engine.batch.step_inputs import StepShape
from engine.copies import ALIGNMENT, upload_to
from engine.devices.cuda.recurrent.attend import HeadConstants, attend, scan
from engine.devices.cuda.recurrent.keep import KeptConstants, keep
from engine.devices.cuda.recurrent.prepare import convolve
from engine.kv.state_slots import RowSpan, StateSlots
from engine.triton_support import ceil_div, power_of_two

_ROWS, _CHANNELS = 16, 64
_KEPT_COLUMNS = 64
_HEADS = 32
_PART, _PART_BY_CHANNEL, _VALUES = 32, 16, 32


class Kept(NamedTuple):
    """The arguments of `keep_block` except for the first, the number of its programs, and its constants."""

    arguments: tuple[Tensor | int, ...]
    programs: int
    constants: KeptConstants


class TritonOperators(StepOperators):
    """Operators that give a row the same bits in any chunk and batch, drafted or not. The state slots'
    windows have each token's own decay.
    """

    name = "triton"

    def __init__(self, state_slots: StateSlots) -> None:
        self.state_slots = state_slots
        self.reach = max(layer.taps for layer in state_slots.layout.layers) - 1
        self._upload = upload_to(state_slots.device)

    def begin_step(self, spans: Sequence[RowSpan]) -> None:
        tables = self.plan_step(spans, StepShape())
        self.use(tables.on(self._upload(tables.arrays)))

    def plan_step(self, spans: Sequence[RowSpan], shape: StepShape) -> Tables[np.ndarray]:
        layout = self.state_slots.layout
        tables = tables_of(spans, [self.state_slots.run(span) for span in spans], layout, self.reach)
        if not shape.sequences:
            return tables
        drafts = shape.drafts or shape.rows_each > 1
        room = Room.of(layout, shape.sequences, shape.rows_each, trees=shape.trees, drafts=drafts)
        return padded(tables, room)

    def use(self, tables: Tables[Tensor]) -> None:
        self.tables = tables

    def causal_conv(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of, inputs = self.state_slots.layers[layer], _aligned(inputs)
        channels, taps = weight.shape
        out = torch.empty(inputs.shape, dtype=torch.float32, device=inputs.device)
        convolve[(len(self.tables.sequences), ceil_div(channels, _CHANNELS))](
            inputs,
            weight,
            bias,
            out,
            of.tail,
            of.inputs,
            self.tables.sequences,
            self.tables.before,
            self.tables.tails,
            of.tail.stride(0),
            of.inputs.stride(0),
            *weight.stride(),
            CHANNELS=channels,
            TAPS=taps,
            PADDED_TAPS=triton.next_power_of_2(taps),
            REACH=self.reach,
            WINDOW=self.state_slots.layout.window,
            ROWS=_ROWS,
            BLOCK=_CHANNELS,
            num_warps=4,
        )
        return out

    def linear_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        query, key, value, decay = map(_aligned, (query, key, value, decay))
        beta = None if beta is None else _aligned(beta)
        read = self.attend(layer, (query, key, value, decay, beta), is_delta=beta is not None)
        self._keep(layer, key, decay)
        return read

    def attend(self, layer: int, inputs: Sequence[Tensor | None], *, is_delta: bool) -> Tensor:
        """Return what the heads read, of aligned inputs. The rows' keys and decays are still to be kept."""
        _, key, value, decay, _ = inputs
        assert key is not None and value is not None and decay is not None
        (key_heads, key_dim), (heads, value_dim) = key.shape[1:], value.shape[1:]
        block, by_channel = min(_VALUES, power_of_two(value_dim)), decay.shape[2] > 1
        part, layout = _PART_BY_CHANNEL if by_channel else _PART, self.state_slots.layout
        sizes = heads, key_heads, key_dim, value_dim, part, block, by_channel, is_delta
        constants = HeadConstants(*sizes, tile_rows(layout.grid), layout.window)
        programs, state = heads * ceil_div(value_dim, block), (heads, key_dim, value_dim)
        return self._walk(attend, programs, layer, inputs, state, OF=constants)

    def selective_scan(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, times: Tensor, rates: Tensor
    ) -> Tensor:
        (heads, key_dim), layout = rates.shape, self.state_slots.layout
        query, key, value, times, rates = map(_aligned, (query, key, value, times, rates))
        read = self._walk(
            scan,
            ceil_div(heads, _HEADS),
            layer,
            (query, key, value, times, rates),
            (heads, key_dim),
            HEADS=heads,
            KEY_DIM=key_dim,
            KEY_PADDED=triton.next_power_of_2(key_dim),
            BLOCK=_HEADS,
            ROWS=tile_rows(layout.grid),
            WINDOW=layout.window,
        )
        self._keep(layer, key, times)
        return read

    def _walk(
        self,
        kernel: Any,
        programs: int,
        layer: int,
        inputs: Sequence[Tensor | None],
        state: tuple[int, ...],
        **constants: Any,
    ) -> Tensor:
        """Launch programs that walk through the sequences' tiles. `inputs` are query, key, value, decay and
        one more; `state` is a state's shape.
        """
        of, tables = self.state_slots.layers[layer], self.tables
        value = inputs[2]
        assert value is not None
        out = torch.empty_like(value)
        kernel[(len(tables.sequences), programs)](
            *inputs,
            out,
            of.state,
            value.new_empty((tables.num_drafted, *state)),
            of.keys,
            of.deltas,
            of.decays,
            tables.sequences,
            tables.tiles,
            *(state_slots.stride(0) for state_slots in (of.state, of.keys, of.deltas, of.decays)),
            **constants,
            num_warps=4,
            num_stages=1,  # rows of a tree read what earlier tiles have written
        )
        return out

    def kept(self, layer: int, key: Tensor, decay: Tensor) -> Kept:
        """Return what a kernel that runs after all heads' takes to keep the rows' keys and decays."""
        of, sequences = self.state_slots.layers[layer], self.tables.sequences
        keys, decays = key[0].numel(), decay[0].numel()
        constants = KeptConstants(keys, decays, self.state_slots.layout.window, _KEPT_COLUMNS)
        tensors = key, decay, of.keys, of.decays, sequences, of.keys.stride(0), of.decays.stride(0)
        return Kept(tensors, len(sequences) * ceil_div(max(keys, decays), _KEPT_COLUMNS), constants)

    def _keep(self, layer: int, key: Tensor, decay: Tensor) -> None:
        kept = self.kept(layer, key, decay)
        keep[(kept.programs,)](*kept.arguments, OF=kept.constants, num_warps=1)


def _aligned(rows: Tensor) -> Tensor:
    """Copy rows unless they are aligned and contiguous: other kernels might sum in another order."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % ALIGNMENT else rows
