"""The runner of models on a CUDA device, whose steps graphs replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.batch.recurrent_plan import Tables
from engine.batch.rows import BlockTable, SequenceRows
from engine.batch.runner import Fill, ForwardOutput, Step
from engine.batch.step_inputs import StepInputs, StepShape, step_inputs
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder, unfit
from engine.devices.cuda.graphs import CudaGraphs, Graph, Graphs, capture_all, stand_ins
from engine.devices.cuda.modules import HybridModules, Modules
from engine.devices.cuda.products import describe
from engine.devices.loaded_model import LoadedModel
from engine.kv.attention import AttentionBackend
from engine.kv.state_slots import StateSlots
from engine.lora.table import Adapters
from engine.upload import Uploader
from protocol.config import ServeConfig

TablesOf = Callable[[Sequence[SequenceRows], StepShape | None], Tables[np.ndarray]]


class Decoder(Protocol):
    name: str

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        """Logits of the rows asked for, and hidden states, if any. The backend has begun its step."""
        ...


class CudaRunner:
    """Steps that fit a bucket have its shape, and their inputs lie at its addresses. With `graphs` they are
    replayed: padding changes no row, and the bucket's kernels are those that run eagerly.
    """

    any_threads = deterministic = False
    can_fill = True

    def __init__(
        self,
        decoder: Decoder,
        backend: AttentionBackend,
        device: torch.device,
        products: str,
        buckets: Buckets,
        graphs: Graphs | None = None,
        tables_of: TablesOf | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """`tables_of`: of recurrent layers, where the model has some. `adapters`: those of rows, which the
        decoder adds.
        """
        self.choice = f"{decoder.name}, eager"
        self.products = products
        self._decoder = decoder
        self._backend = backend
        self._block_table = BlockTable(backend.block_size, backend.num_tables)
        self._buckets = buckets
        self._upload, self._upload_bucket = Uploader(device), Uploader(device)
        self._graphs = graphs
        self._tables_of = tables_of
        self._adapters = adapters
        self._captured: dict[StepShape, Graph] = {}
        self._stand_ins: dict[StepShape, StepShape] = {}
        """The larger buckets whose graphs serve those without one."""

    @torch.inference_mode()
    def warm_up(self) -> float:
        """Captures the buckets' graphs, if the forward can be captured."""
        if self._graphs is None:
            return 0.0
        started = time.monotonic()
        shapes = list(self._buckets)
        for shape in shapes:  # from now on no address changes
            self._inputs([], [], shape)
        widest = self._inputs([], [], max(shapes, key=lambda shape: (shape.rows, shape.adapters)))
        self._kept = self._forward(widest)
        if fault := self._graphs.fault(partial(self._forward, widest)):
            self.choice += f" (not to be captured: {fault})"
            return time.monotonic() - started
        self._captured = capture_all(shapes, partial(self._capture, self._graphs), self._graphs)
        self._stand_ins = stand_ins(shapes, self._captured)
        if self._captured:
            self.choice = f"{self._decoder.name}, {len(self._captured)} graphs"
        return time.monotonic() - started

    def _capture(self, graphs: Graphs, shape: StepShape) -> Graph:
        """Capture a step of padding rows, which write nowhere."""
        inputs = self._inputs([], [], shape)
        self._forward_kept(inputs)
        graph = graphs.new()
        graph.capture(partial(self._forward_kept, inputs))
        return graph

    @torch.inference_mode()
    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        logits, hidden, is_kept = self._run(step, fill)
        if not step.wants_hidden or hidden is None:
            return ForwardOutput(logits, None)
        hidden = hidden[: sum(len(rows.token_ids) for rows in step.batch)]
        return ForwardOutput(logits, hidden.clone() if is_kept else hidden)

    def _run(self, step: Step, fill: Fill | None) -> tuple[Tensor, Tensor | None, bool]:
        """Logits, hidden states of all rows and of padding, and whether the next call overwrites them."""
        batch, logit_rows = step.batch, step.logit_rows
        shape = self._buckets.shape_of(batch, len(logit_rows), self._backend.block_size)
        if shape is not None:
            shape = self._stand_ins.get(shape, shape)
        inputs = self._inputs(batch, logit_rows, shape)
        if fill is not None:
            fill(inputs)
        self._backend.plan(inputs.attention)
        graph = self._captured.get(shape) if shape is not None else None
        if graph is None:
            logits, hidden = self._forward(inputs)
        else:
            graph.replay()
            logits, hidden = self._kept
        return logits[: len(logit_rows)], hidden, graph is not None

    def _inputs(
        self, batch: Sequence[SequenceRows], logit_rows: Sequence[int], shape: StepShape | None
    ) -> StepInputs:
        upload = self._upload if shape is None else self._upload_bucket
        tables = None if self._tables_of is None else self._tables_of(batch, shape)
        least = shape or StepShape(logits=1, adapters=any(rows.adapter for rows in batch))
        adapters = self._adapters.addresses(batch) if self._adapters is not None and least.adapters else None
        return step_inputs(batch, logit_rows, upload, self._block_table, least, tables, adapters)

    def _forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        self._backend.begin_step(inputs.attention)
        return self._decoder.forward(inputs)

    def _forward_kept(self, inputs: StepInputs) -> None:
        """To where every graph's results go: beside these, graphs share their memory."""
        for kept, computed in zip(self._kept, self._forward(inputs), strict=True):
            if kept is not None and computed is not None:
                kept[: len(computed)].copy_(computed)


def runner_of(
    config: ServeConfig,
    loaded: LoadedModel,
    backend: AttentionBackend,
    hidden_layers: tuple[int, ...] = (),
    drafts: bool = False,
    state_slots: StateSlots | None = None,
) -> CudaRunner:
    """The runner of the CUDA decoder where that fits. `drafts`: it drafts chains. Recurrent layers need
    `state_slots`.
    """
    decoder: Decoder
    tables_of: TablesOf | None = None
    adapters, longest = loaded.adapters, loaded.max_model_len
    if state_slots is not None:
        decoder = hybrid = HybridModules(loaded, backend, state_slots, hidden_layers, drafts)
        tables_of = hybrid.tables
    elif (program := loaded.program) is not None and unfit(program) is None:
        decoder = CudaDecoder(program, backend, longest, hidden_layers, adapters)
    else:
        decoder = Modules(loaded.model, backend, hidden_layers, adapters)
    products = describe(loaded.model, loaded.dtype)
    if drafts:
        buckets = Buckets.of_drafts(config, longest)
    else:
        buckets = Buckets.of(config, longest, adapters is not None)
    graphs = graphs_for(config, loaded.device)
    return CudaRunner(decoder, backend, loaded.device, products, buckets, graphs, tables_of, adapters)


def graphs_for(config: ServeConfig, device: torch.device) -> Graphs | None:
    return None if config.enforce_eager else CudaGraphs(device)
