"""CUDA graphs: what a function puts on the device, recorded once and replayed in one call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

import torch

from engine.batch.step_inputs import StepShape

logger = logging.getLogger("tandem.engine")

MOST_S = 60.0
"""For all graphs of a model."""


class CudaGraphs:
    """Graphs that never run at once, so that what they compute may lie in the same memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def new(self) -> CudaGraph:
        return CudaGraph(self._pool)

    def free_bytes(self) -> int:
        """Free memory of the device."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def fault(self, work: Callable[[], object]) -> str:
        """Why `work`, which has run before, cannot be captured, as where it waits for the device. Empty if it
        can.
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
        """Record what `work` launches, which has run before: nothing is compiled or set up on the way."""
        # Other threads of the worker may ask CUDA for memory meanwhile. If the device refuses,
        # `torch.cuda.graph` leaves the thread on its own stream.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            work()

    def replay(self) -> None:
        """Launch it again: the same constants, and the same addresses."""
        self._graph.replay()


def capture_all(
    shapes: Sequence[StepShape], capture: Callable[[StepShape], CudaGraph], graphs: CudaGraphs
) -> dict[StepShape, CudaGraph]:
    """One for each shape, as far as `MOST_S` and half of the free memory go."""
    captured: dict[StepShape, CudaGraph] = {}
    started, free = time.monotonic(), graphs.free_bytes()
    for shape in _by_need(shapes):
        if time.monotonic() - started > MOST_S or graphs.free_bytes() < free / 2:
            break
        try:
            captured[shape] = capture(shape)
        except torch.OutOfMemoryError:
            continue
        except RuntimeError as error:
            logger.warning("no more CUDA graphs: the device refuses to capture a step: %s", error)
            break
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
    """First the largest for each number of rows of a sequence, in whose memory the others find theirs, and
    which any of their steps fits. Then from the smallest on: launches are most of a small step's time.
    """
    rising = sorted(shapes, key=_size)
    largest = {shape.rows_each: shape for shape in rising}
    first = sorted(largest.values(), key=_size, reverse=True)
    return [*first, *(shape for shape in rising if shape not in first)]


def stand_ins(shapes: Sequence[StepShape], captured: Collection[StepShape]) -> dict[StepShape, StepShape]:
    """For shapes that were not captured, the least captured one that takes their steps, if any does."""
    rising = sorted(captured, key=_size)
    found = {}
    for shape in shapes:
        larger = None if shape in captured else next((each for each in rising if each.takes(shape)), None)
        if larger is not None:
            found[shape] = larger
    return found


def _size(shape: StepShape) -> tuple[int, int, bool]:
    return shape.rows, shape.blocks, shape.adapters
