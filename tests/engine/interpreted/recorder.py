"""A CUDA graph on the CPU: it records a step's launches with addresses and constants, and repeats them on the
same memory, with Triton kernels in the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import InterpretedFunction

from tests.engine.absent_gpu import LAUNCHERS

_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty"}


@contextmanager
def pageable_memory() -> Iterator[None]:
    """Replace pinned memory, which needs a GPU. No copy is ever under way."""

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def query(self) -> bool:
            return True

    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
        patch.setattr(torch.cuda, "Event", Event)
        yield


class RecordedGraph:
    """A recorded graph. As in a graph's private memory, all that `work` allocates is undefined before a
    replay: NaN.
    """

    def __init__(self) -> None:
        self._launches: list[Callable[[], object]] = []
        self._made: list[Tensor] = []
        self.num_replays = 0

    def capture(self, work: Callable[[], object]) -> None:
        run = InterpretedFunction.run

        def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._launches.append(lambda: run(kernel, *args, grid=grid, warmup=False, **kwargs))

        with pytest.MonkeyPatch.context() as patch, _Operators(self):
            patch.setattr(InterpretedFunction, "run", record)
            work()

    def replay(self) -> None:
        self.num_replays += 1
        for made in self._made:
            made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).max)
        for launch in self._launches:
            launch()

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **kwargs)
        writes = func._schema.is_mutable
        if not writes and _addresses(result) & _addresses((args, kwargs)):
            return result  # a view
        if not writes:
            self._made += [each for each in tree_flatten(result)[0] if isinstance(each, Tensor)]
        if name not in _EMPTY:
            again = partial(func, *args, **kwargs)
            self._launches.append(again if writes else lambda: result.copy_(again()))
        return result


def _addresses(given: Any) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in tree_flatten(given)[0] if isinstance(each, Tensor)}


class _Operators(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LAUNCHERS:
            with self:  # its own launches are recorded
                return LAUNCHERS[func](*args, **(kwargs or {}))
        return self._graph.operator(func, args, kwargs or {})


class RecordedGraphs:
    def __init__(self, most: int = 100) -> None:
        """Make a recorder. Beyond `most` captures the device's memory is used up."""
        self.graphs: list[RecordedGraph] = []
        self._most = most

    def new(self) -> RecordedGraph:
        self.graphs.append(RecordedGraph())
        return self.graphs[-1]

    def free_bytes(self) -> int:
        return 1 << 30 if len(self.graphs) < self._most else 0

    def fault(self, work: Callable[[], object]) -> str:
        return ""
