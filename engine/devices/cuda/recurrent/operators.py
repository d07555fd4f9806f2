"""The host's side of the Triton kernels of recurrent layers: launches, without reads from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from engine.batch.recurrent_plan import Room, Tables, padded, tables_of, tile_rows
from engine.batch.runner import StepOperators
from engine.batch.step_inputs import StepShape
from engine.copies import ALIGNMENT, upload_to
from engine.devices.cuda.recurrent.attend import HeadConstants, attend
from engine.devices.cuda.recurrent.convolve import convolve
from engine.devices.cuda.recurrent.keep import keep
from engine.devices.cuda.recurrent.prepare import HeadPlaces, MixerConstants, prepare
from engine.devices.cuda.recurrent.scan import scan
from engine.kv.state_slots import LayerStateSlots, RecurrentLayer, RowSpan, StateSlots
from engine.model.program import MixerKind, Recurrent
from engine.triton_support import ceil_div, power_of_two

_ROWS, _CHANNELS, _PREPARED_ROWS = 16, 64, 8
_KEPT_COLUMNS = 256
_HEADS = 32
_PART, _PART_BY_CHANNEL, _VALUES = 32, 16, 32


class TritonOperators(StepOperators):
    """Operators that give a row the same bits in any chunk and batch, drafted or not. The state slots'
    windows have each token's own decay.
    """

    name = "triton"

    def __init__(self, state_slots: StateSlots) -> None:
        self._state_slots = state_slots
        self._reach = max(layer.taps for layer in state_slots.layout.layers) - 1
        self._upload = upload_to(state_slots.device)

    def begin_step(self, spans: Sequence[RowSpan]) -> None:
        tables = self.plan_step(spans, StepShape())
        self.use(tables.on(self._upload(tables.arrays)))

    def plan_step(self, spans: Sequence[RowSpan], shape: StepShape) -> Tables[np.ndarray]:
        layout = self._state_slots.layout
        tables = tables_of(spans, [self._state_slots.run(span) for span in spans], layout, self._reach)
        if not shape.sequences:
            return tables
        drafts = shape.drafts or shape.rows_each > 1
        room = Room.of(layout, shape.sequences, shape.rows_each, trees=shape.trees, drafts=drafts)
        return padded(tables, room)

    def use(self, tables: Tables[Tensor]) -> None:
        self._tables = tables

    def causal_conv(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of, inputs = self._state_slots.layers[layer], _aligned(inputs)
        channels, taps = weight.shape
        out = torch.empty(inputs.shape, dtype=torch.float32, device=inputs.device)
        convolve[(len(self._tables.sequences), ceil_div(channels, _CHANNELS))](
            inputs,
            weight,
            bias,
            out,
            of.tail,
            of.inputs,
            self._tables.sequences,
            self._tables.before,
            self._tables.tails,
            of.tail.stride(0),
            of.inputs.stride(0),
            *weight.stride(),
            CHANNELS=channels,
            TAPS=taps,
            PADDED_TAPS=triton.next_power_of_2(taps),
            REACH=self._reach,
            WINDOW=self._state_slots.layout.window,
            ROWS=_ROWS,
            BLOCK=_CHANNELS,
            num_warps=4,
        )
        return out

    def linear_attention(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None
    ) -> Tensor:
        return self._attend(layer, (query, key, value, decay, beta), is_delta=beta is not None)

    def mix(self, mixer: Recurrent, made: Tensor, strengths: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        """Run a mixer from its products' outputs, with the heads' gates before they are activated. Return
        what its heads read, and their values: both float32 [rows, heads, value_dim].
        """
        assert mixer.rates is not None and mixer.shifts is not None
        layout, of = self._state_slots.layout, self._state_slots.layers[mixer.number]
        shape = layout.layers[mixer.number]
        is_delta = mixer.kind is not MixerKind.STATE_SPACE
        block = power_of_two(max(shape.key_dim, shape.value_dim))
        keys, values = (shape.num_key_heads, shape.key_dim), (shape.num_heads, shape.value_dim)
        sizes = keys, keys, values, (shape.num_heads, shape.decay_dim), (shape.num_heads,)
        query, key, value, decay, strength = (
            torch.empty((len(made), *size), dtype=torch.float32, device=made.device) for size in sizes
        )
        gate_blocks = ceil_div(shape.num_heads * shape.decay_dim, block)
        prepare[(len(self._tables.sequences), 2 * shape.num_key_heads + shape.num_heads + gate_blocks)](
            made,
            strengths,
            times,
            mixer.taps,
            mixer.bias,
            mixer.rates,
            mixer.shifts,
            query,
            key,
            value,
            decay,
            strength,
            of.tail,
            of.inputs,
            self._tables.sequences,
            self._tables.before,
            self._tables.tails,
            mixer.shortest,
            mixer.longest,
            of.tail.stride(0),
            of.inputs.stride(0),
            made.stride(0),
            strengths.stride(0),
            times.stride(0),
            *mixer.taps.stride(),
            PLACES=_places(shape, is_delta=is_delta, is_interleaved=mixer.is_interleaved),
            OF=MixerConstants(
                shape.num_heads,
                shape.num_key_heads,
                shape.key_dim,
                shape.value_dim,
                shape.decay_dim,
                is_delta,
                shape.channels,
                shape.taps,
                triton.next_power_of_2(shape.taps),
                self._reach,
                layout.window,
                _PREPARED_ROWS,
                block,
            ),
            num_warps=4,
        )
        return self._attend(mixer.number, (query, key, value, decay, strength), is_delta=is_delta), value

    def _attend(self, layer: int, inputs: Sequence[Tensor | None], *, is_delta: bool) -> Tensor:
        _, key, value, decay, _ = inputs
        assert key is not None and value is not None and decay is not None
        (key_heads, key_dim), (heads, value_dim) = key.shape[1:], value.shape[1:]
        block, by_channel = min(_VALUES, power_of_two(value_dim)), decay.shape[2] > 1
        part, layout = _PART_BY_CHANNEL if by_channel else _PART, self._state_slots.layout
        sizes = heads, key_heads, key_dim, value_dim, part, block, by_channel, is_delta
        constants = HeadConstants(*sizes, tile_rows(layout.grid), layout.window)
        programs, state = heads * ceil_div(value_dim, block), (heads, key_dim, value_dim)
        return self._walk(attend, programs, layer, inputs, state, OF=constants)

    def selective_scan(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, times: Tensor, rates: Tensor
    ) -> Tensor:
        (heads, key_dim), layout = rates.shape, self._state_slots.layout
        return self._walk(
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
        of, tables = self._state_slots.layers[layer], self._tables
        query, key, value, decay, last = (None if each is None else _aligned(each) for each in inputs)
        assert key is not None and value is not None and decay is not None
        out = torch.empty_like(value)
        kernel[(len(tables.sequences), programs)](
            query,
            key,
            value,
            decay,
            last,
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
        self._keep(of, key, decay)
        return out

    def _keep(self, of: LayerStateSlots, key: Tensor, decay: Tensor) -> None:
        keys, decays = key[0].numel(), decay[0].numel()
        keep[(len(self._tables.sequences), ceil_div(max(keys, decays), _KEPT_COLUMNS))](
            key,
            decay,
            of.keys,
            of.decays,
            self._tables.sequences,
            of.keys.stride(0),
            of.decays.stride(0),
            KEYS=keys,
            DECAYS=decays,
            WINDOW=self._state_slots.layout.window,
            BLOCK=_KEPT_COLUMNS,
            num_warps=4,
        )


def _places(shape: RecurrentLayer, *, is_delta: bool, is_interleaved: bool) -> HeadPlaces:
    """Return the places of a layer's heads in its channels and in its products' outputs."""
    each = shape.num_heads // shape.num_key_heads
    keys, values = shape.num_key_heads * shape.key_dim, shape.num_heads * shape.value_dim
    own = each * shape.value_dim
    if is_interleaved:  # each key head's query, key, values and output gates are together
        step = 2 * (shape.key_dim + own)
        return HeadPlaces(0, keys, 2 * keys, 0, shape.key_dim, 2 * shape.key_dim, step, step, 2 * each)
    if is_delta:
        return HeadPlaces(0, keys, 2 * keys, 0, keys, 2 * keys, shape.key_dim, own, each)
    query, key = values + keys, values  # the products' outputs begin with the output gates
    return HeadPlaces(query, key, 0, values + query, values + key, values, shape.key_dim, own, each)


def _aligned(rows: Tensor) -> Tensor:
    """Copy rows unless they are aligned and contiguous: other kernels might sum in another order."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % ALIGNMENT else rows
