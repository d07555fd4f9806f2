"""The runner of models on a CUDA device, and its graphs: launches, recorded once and replayed in one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows, StepInputs, StepShape
from engine.copies import Upload, Uploader
from engine.devices.cuda.adapters import adapted_modules
from engine.devices.cuda.buckets import MOST_ROWS, Buckets
from engine.devices.cuda.decoder import CudaDecoder, unfit
from engine.devices.cuda.products import describe
from engine.devices.cuda.recurrent.operators import TritonOperators
from engine.devices.loaded_model import LoadedModel
from engine.devices.step_runner import Forward, Outputs, StepRunner
from engine.devices.torch.program import ProgramForward, TorchProgram
from engine.devices.torch.runner import Modules
from engine.kv.attention import AttentionBackend
from engine.kv.state_slots import StateSlots
from protocol.config import ServeConfig
from protocol.errors import UnsupportedModelError

logger = logging.getLogger("tandem.engine")

MOST_S = 60.0
"""The longest time that capturing all graphs of a model takes."""


class CudaGraphs:
    """Graphs that never run at the same time, so they share the memory of intermediate results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def new(self) -> CudaGraph:
        return CudaGraph(self._pool)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def fault(self, work: Callable[[], object]) -> str:
        """Return why `work`, which has run before, cannot be captured, for example because it waits for the
        device; an empty string if it can.
        """
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return ""


class CudaGraph:
    def __init__(self, pool: tuple[int, int]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def capture(self, work: Callable[[], object]) -> None:
        """Record what `work` launches. It has run before, so nothing is compiled or set up meanwhile."""
        # Other threads of the worker may ask CUDA for memory meanwhile. If the device refuses,
        # `torch.cuda.graph` leaves the thread on its own stream.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            work()

    def replay(self) -> None:
        """Launch the recorded work again, with the same constants and addresses."""
        self._graph.replay()


def capture_all(
    shapes: Sequence[StepShape],
    capture: Callable[[StepShape], CudaGraph],
    graphs: CudaGraphs,
    agree: Callable[[bool], bool] = bool,
) -> dict[StepShape, CudaGraph]:
    """Capture a graph for each shape until `MOST_S` or half of the free memory is used up. Tensor-parallel
    ranks `agree`: they capture and keep the same ones.
    """
    captured: dict[StepShape, CudaGraph] = {}
    started, free, goes_on = time.monotonic(), graphs.free_bytes(), True
    for shape in _by_need(shapes):
        goes_on &= time.monotonic() - started <= MOST_S and graphs.free_bytes() >= free / 2
        if not agree(goes_on):
            break
        graph = None
        try:
            graph = capture(shape)
        except torch.OutOfMemoryError:
            pass
        except RuntimeError as error:
            logger.warning("no more CUDA graphs: the device refuses to capture a step: %s", error)
            goes_on = False
        if agree(graph is not None) and graph is not None:
            captured[shape] = graph
    logger.info(
        "captured %d of %d CUDA graphs in %.1f s (at most %.0f s) and %.2f GiB (at most %.2f GiB); "
        "steps without one take a larger one, or run eagerly",
        len(captured),
        len(shapes),
        time.monotonic() - started,
        MOST_S,
        (free - graphs.free_bytes()) / 2**30,
        free / 2 / 2**30,
    )
    return captured


def _by_need(shapes: Sequence[StepShape]) -> list[StepShape]:
    """Order shapes for capture: first the largest for each number of rows per sequence, which fits all their
    steps and lends its memory to the others. Then the smallest first: launches take most of their time.
    """
    rising = sorted(shapes, key=_size)
    largest = {shape.rows_each: shape for shape in rising}
    first = sorted(largest.values(), key=_size, reverse=True)
    return [*first, *(shape for shape in rising if shape not in first)]


def stand_ins(shapes: Sequence[StepShape], captured: Collection[StepShape]) -> dict[StepShape, StepShape]:
    """Return, for shapes without a graph, the smallest captured shape that takes their steps, if any."""
    rising = sorted(captured, key=_size)
    found = {}
    for shape in shapes:
        larger = None if shape in captured else next((each for each in rising if each.takes(shape)), None)
        if larger is not None:
            found[shape] = larger
    return found


def _size(shape: StepShape) -> tuple[int, int, bool]:
    return shape.rows, shape.blocks, shape.adapters


class CudaRunner(StepRunner):
    """A runner that pads steps to buckets, with inputs at the bucket's addresses. With `graphs` the steps are
    replayed: padding changes no row, and graphs run the same kernels as eager steps.
    """

    def __init__(
        self,
        forward: Forward,
        backend: AttentionBackend,
        device: torch.device,
        products: str,
        buckets: Buckets,
        graphs: CudaGraphs | None = None,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """Tensor-parallel ranks `agree` on which graphs they have."""
        super().__init__(forward, backend, products)
        self.choice = f"{forward.name}, eager"
        self._buckets, self._graphs, self._agree = buckets, graphs, agree
        self._upload, self._upload_bucket = Uploader(device), Uploader(device)
        self._captured: dict[StepShape, CudaGraph] = {}
        self._stand_ins: dict[StepShape, StepShape] = {}
        """The larger buckets whose graphs serve buckets without one."""
        self._hidden: Tensor | None = None
        """The hidden states that a draft head reads in bucket steps."""
        if forward.no_hidden is not None:
            self._hidden = forward.no_hidden.new_zeros((MOST_ROWS, forward.no_hidden.shape[1]))

    @torch.inference_mode()
    def warm_up(self) -> float:
        """Compile the kernels of eager steps. Capture the buckets' graphs if the forward can be captured."""
        started = time.monotonic()
        for shape in self._buckets.eager_forms():
            self._compute(self._inputs(Step([], []), shape))
        if self._graphs is None:
            return time.monotonic() - started
        shapes = list(self._buckets)
        for shape in shapes:  # from now on no address changes
            self._inputs(Step([], []), shape)
        widest = self._inputs(Step([], []), max(shapes, key=lambda shape: (shape.rows, shape.adapters)))
        self._kept = self._compute(widest)
        if fault := self._graphs.fault(partial(self._compute, widest)):
            self.choice += f" (not to be captured: {fault})"
            return time.monotonic() - started
        self._captured = capture_all(shapes, partial(self._capture, self._graphs), self._graphs, self._agree)
        self._stand_ins = stand_ins(shapes, self._captured)
        if self._captured:
            self.choice = f"{self._forward.name}, {len(self._captured)} graphs"
        return time.monotonic() - started

    def _capture(self, graphs: CudaGraphs, shape: StepShape) -> CudaGraph:
        """Capture a step of padding rows, which write nothing to the pool."""
        inputs = self._inputs(Step([], []), shape)
        self._compute_kept(inputs)
        graph = graphs.new()
        graph.capture(partial(self._compute_kept, inputs))
        return graph

    def _compute_kept(self, inputs: StepInputs) -> None:
        """Compute, and copy the results to the place that all graphs share."""
        for kept, computed in zip(self._kept, self._compute(inputs), strict=True):
            if kept is not None and computed is not None:
                kept[: len(computed)].copy_(computed)

    def _shape_of(self, step: Step) -> StepShape:
        shape = self._buckets.shape_of(step.batch, len(step.logit_rows), self._backend.block_size)
        if shape is None:
            return StepShape(logits=1, adapters=any(rows.adapter for rows in step.batch))
        return self._stand_ins.get(shape, shape)

    def _uploader(self, shape: StepShape) -> Upload:
        return self._upload_bucket if shape.sequences else self._upload

    def _placed(self, hidden: Tensor, rows: int) -> Tensor:
        """Return the hidden states at the address that graphs read, if they fit there."""
        if self._hidden is None or rows > len(self._hidden):
            return super()._placed(hidden, rows)
        self._hidden[: len(hidden)].copy_(hidden)
        return self._hidden[:rows]

    def _execute(
        self, inputs: StepInputs, batch: Sequence[SequenceRows], shape: StepShape
    ) -> tuple[Outputs, bool]:
        graph = self._captured.get(shape)
        if graph is None:
            return self._compute(inputs), False
        graph.replay()
        return self._kept, True


def runner_of(
    config: ServeConfig,
    loaded: LoadedModel,
    backend: AttentionBackend,
    hidden_layers: tuple[int, ...] = (),
    state_slots: StateSlots | None = None,
    drafts: bool = False,
) -> CudaRunner:
    """Return a runner that uses the CUDA decoder if it fits the program. `drafts`: the model drafts chains.
    Recurrent layers need `state_slots`.
    """
    adapters, longest, program = loaded.adapters, loaded.max_model_len, loaded.program
    operators = None if state_slots is None else TritonOperators(state_slots)
    forward: Forward
    fault = (
        "no family describes it" if program is None else unfit(program, with_adapters=adapters is not None)
    )
    if fault is not None and loaded.share is not None:
        raise UnsupportedModelError(f"{loaded.model.config.model_type}: not on several GPUs: {fault}")
    if program is not None and fault is None:
        recurrent = () if state_slots is None else state_slots.layout.layers
        forward = CudaDecoder(program, backend, longest, hidden_layers, adapters, operators, recurrent)
    else:
        hooks = None if loaded.recurrent is None else loaded.recurrent.hooks
        by_address = None if adapters is None else adapted_modules(adapters)
        forward = Modules(loaded.model, backend, hidden_layers, adapters, hooks, operators, by_address)
    if drafts:
        buckets = Buckets.of_drafts(config, longest)
    else:
        buckets = Buckets.of(config, longest, adapters is not None)
    products, graphs = describe(_modules(loaded), loaded.dtype), graphs_for(config, loaded.device)
    agree = bool if loaded.share is None else loaded.share.agree
    return CudaRunner(forward, backend, loaded.device, products, buckets, graphs, agree)


def _modules(loaded: LoadedModel) -> Iterator[nn.Module]:
    """Yield the modules that multiply: the model's, or those of a rank's share."""
    if loaded.share is None:
        return loaded.model.modules()
    layers = loaded.share.program.layers
    products = [product for layer in layers for product in layer.products()]
    return (module for product in products for linear in product.linears for module in linear.modules())


def runner_of_head(
    config: ServeConfig, program: TorchProgram, target: LoadedModel, backend: AttentionBackend, products: str
) -> CudaRunner:
    forward, buckets = ProgramForward(program, backend), Buckets.of_heads(config, target.max_model_len)
    graphs = graphs_for(config, target.device)
    return CudaRunner(forward, backend, target.device, products, buckets, graphs)


def graphs_for(config: ServeConfig, device: torch.device) -> CudaGraphs | None:
    return None if config.enforce_eager else CudaGraphs(device)
