"""CUDA graphs: the launches of a function, recorded once and replayed in one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

import torch

from engine.batch.step_inputs import StepShape

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
