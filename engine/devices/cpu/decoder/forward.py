"""The native decoder's runner, which also drafts chains token by token."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from engine.batch.runner import ChainDrafter, Fill, ForwardOutput, Step
from engine.batch.step_inputs import (
    BlockTable,
    RowArrays,
    SequenceRows,
    StepShape,
    are_chains,
    span_of,
    step_inputs,
)
from engine.copies import upload_to
from engine.devices.attention import by_table
from engine.devices.cpu.decoder.native_model import (
    BatchArgs,
    DraftArgs,
    LayerPaths,
    ModelArgs,
    NativeModel,
    RowsArgs,
    library,
)
from engine.devices.cpu.recurrent.native import CpuSpans, kernels, layer_state_slots
from engine.kv.attention import AttentionBackend, NativeBackend
from engine.kv.state_slots import StateSlots
from engine.linear import packed
from engine.lora.layers import kernel as adapt_kernel
from engine.lora.table import Adapters, PackedProduct, PartArgs, Weights
from native.build import address_of
from native.threads import parallel


class NativeDecoder:
    """A `Runner` of a packed program, with its KV in `backend`'s pool.

    Raises BuildError if the kernel cannot be built.
    """

    choice = "native decoder"
    products = "packed weights, summed alike in every batch"
    any_threads = deterministic = True
    can_fill = False

    def __init__(
        self,
        description: NativeModel,
        backend: AttentionBackend,
        hidden_layers: tuple[int, ...] = (),
        adapters: Adapters | None = None,
        state_slots: StateSlots | None = None,
    ) -> None:
        """Make the runner. `backend` is the CPU's, over one or more block tables. `hidden_layers` are
        captured, numbered like in Transformers' `hidden_states`. Recurrent layers need `state_slots`.
        """
        self._library = library(description.dtype)
        self._dtype = description.dtype
        self._description = description  # keeps the decoder's memory alive
        self._backend = backend
        self._upload = upload_to(torch.device("cpu"))
        model = description.model
        self.vocab_size = model.vocab
        self.block_table = BlockTable(backend.block_size, backend.num_tables)
        self._hidden_size = model.hidden
        products = packed.library()
        is_wide = self._dtype is torch.float32
        linear = products.tandem_linear_of_float32 if is_wide else products.tandem_linear
        model.linear, model.parallel = address_of(linear), parallel()
        self._tables = self._take_tables(backend, model)
        model.quantized_linear = address_of(products.tandem_quantized_linear)
        model.quantized_rows = address_of(products.tandem_quantized_rows)
        model.routed_linear = address_of(products.tandem_routed_linear)
        model.routed_quantized_linear = address_of(products.tandem_routed_quantized_linear)
        self._adapters: NativeAdapters | None = None
        if adapters is not None:
            self._adapters = NativeAdapters(adapters, description.paths, description.columns)
            model.adapt = address_of(adapt_kernel())
        self._state_slots = NativeStateSlots(state_slots, model) if state_slots is not None else None
        self._order = sorted(hidden_layers)
        self._asked = [self._order.index(layer) for layer in hidden_layers]
        self._hidden_layers = torch.tensor(self._order)
        self._decoder: int = self._library.tandem_decoder_create(ctypes.byref(model))
        weakref.finalize(self, self._library.tandem_decoder_destroy, self._decoder)

    @staticmethod
    def _take_tables(backend: AttentionBackend, model: ModelArgs) -> tuple[object, ...]:
        """Set the model's attention for each block table. Return the memory that the model reads."""
        backends, tables = by_table(backend)
        kernels = (ctypes.c_void_p * len(backends))()
        for number, each in enumerate(backends):
            assert isinstance(each, NativeBackend)
            kernels[number], model.begin, model.attend = each.addresses
            each.parallel = model.parallel
        of_layers = np.zeros(model.num_layers + model.num_beside, np.int64)
        of_layers[: len(tables or ())] = tables or ()
        model.attention, model.tables = ctypes.addressof(kernels), of_layers.ctypes.data
        model.num_tables = len(backends)
        return kernels, of_layers

    @property
    def chains(self) -> ChainDrafter | None:
        """The drafter of chains; None with recurrent layers, as each drafted row would need its own state."""
        return self if self._state_slots is None else None

    def warm_up(self) -> float:
        """Do nothing: there is nothing to compile."""
        return 0.0

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        if step.hidden is not None:
            return ForwardOutput(*self._forward(step))
        if not (step.wants_hidden and self._order):
            return ForwardOutput(self._forward(step)[0], None)
        logits, hidden = self._forward(step, self._hidden_layers)
        if self._asked != sorted(self._asked):
            hidden = hidden.unflatten(1, (-1, self._hidden_size))[:, self._asked].flatten(1)
        return ForwardOutput(logits, hidden)

    def _forward(self, step: Step, hidden_layers: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the requested rows' logits, and hidden states: those of `hidden_layers`, [rows, layers *
        hidden_size], or for a draft head, which reads `step.hidden`, the requested rows' outputs. Raises
        ValueError if the batch is out of range.
        """
        batch, logit_rows = step.batch, step.logit_rows
        begins_itself = self._backend.is_causal and are_chains(batch)
        chains = RowArrays.of(batch, self.block_table) if begins_itself else None
        if chains is not None:
            count, token_ids, positions = len(chains.token_ids), chains.token_ids.ctypes.data, None
        else:
            inputs = step_inputs(batch, [], self._upload, self.block_table, StepShape())
            self._backend.begin_step(inputs.attention)
            count = len(inputs.token_ids)
            token_ids, positions = inputs.token_ids.data_ptr(), inputs.positions.data_ptr()
        before = None if step.hidden is None else step.hidden.contiguous()
        wanted = np.array(logit_rows)
        logits = torch.empty((len(logit_rows), self.vocab_size), dtype=self._dtype)
        captured = 0 if hidden_layers is None else len(hidden_layers)
        num_hidden, layers = (count, captured) if before is None else (len(logit_rows), 1)
        hidden = torch.empty((num_hidden, layers * self._hidden_size), dtype=self._dtype)
        fields = RowsArgs(
            token_ids,
            positions,
            count,
            wanted.ctypes.data,
            len(logit_rows),
            logits.data_ptr(),
            None if hidden_layers is None else hidden_layers.data_ptr(),
            captured,
            hidden.data_ptr(),
            None if before is None else before.data_ptr(),
            None if before is None else hidden.data_ptr(),
        )
        if self._adapters is not None:
            self._adapters.place(batch, fields)
        if self._state_slots is not None:
            self._state_slots.place(batch, fields)
        rows, threads = ctypes.byref(fields), torch.get_num_threads()
        if chains is not None:
            described = ctypes.byref(self._batch(chains))
            _check(self._library.tandem_decoder_run(self._decoder, described, rows, threads))
        else:
            self._library.tandem_decoder_forward(self._decoder, rows, threads)
        return logits, hidden

    def draft(
        self,
        batch: RowArrays,
        seeds_and_counts: np.ndarray,
        temperatures: np.ndarray,
        vocab_size: int,
        before: Tensor | None = None,
        distributions: Tensor | None = None,
    ) -> np.ndarray:
        """Draft like `ChainDrafter.draft`. Raises ValueError if the batch is out of range."""
        before = None if before is None else before.contiguous()
        drafted = np.empty((int(seeds_and_counts[1, 0]), seeds_and_counts.shape[1]), np.int64)
        seeds, counts = (row.ctypes.data for row in seeds_and_counts)
        fields = DraftArgs(
            self._batch(batch),
            vocab_size,
            counts,
            seeds,
            temperatures.ctypes.data,
            None if before is None else before.data_ptr(),
            drafted.ctypes.data,
            None if distributions is None else distributions.data_ptr(),
            0 if distributions is None else distributions.shape[2],
        )
        threads = torch.get_num_threads()
        _check(self._library.tandem_decoder_draft(self._decoder, ctypes.byref(fields), threads))
        return drafted

    def _batch(self, batch: RowArrays) -> BatchArgs:
        starts, ends = (row.ctypes.data for row in batch.spans)
        return BatchArgs(
            *batch.blocks.shape[-2:],
            self._backend.block_size,
            batch.token_ids.ctypes.data,
            starts,
            ends,
            batch.blocks.ctypes.data,
            None if batch.first_keys is None else batch.first_keys.ctypes.data,
        )


def _check(wrong: bytes | None) -> None:
    if wrong:
        raise ValueError(f"packed rows: {wrong.decode()} is out of range")


class NativeStateSlots:
    """The state slots in the decoder's structs. Raises BuildError if the kernel cannot be built."""

    def __init__(self, state_slots: StateSlots, model: ModelArgs) -> None:
        self._layers = layer_state_slots(state_slots)
        self._spans = CpuSpans(state_slots)
        model.state_slots = ctypes.addressof(self._layers)
        model.convolve, model.attend_linear = map(address_of, kernels())

    def place(self, batch: Sequence[SequenceRows], fields: RowsArgs) -> None:
        """Write the places of the rows' states to `fields`, valid until the next call."""
        self._spans.begin(map(span_of, batch))
        fields.spans = ctypes.addressof(self._spans.args)


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
