"""A simulated GPU without memory: it counts kernels, and records each line where the host would wait."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from engine.devices.torch import transformers_hook
from engine.lora import layers

GPU = torch.device("meta")
ROOT = str(Path(__file__).parents[2])
DEVICE_MS = 1234.0
"""The time between any two events."""
LAUNCHERS: dict[Any, Callable[..., Any]] = {
    transformers_hook.paged_attention: transformers_hook._run,
    layers.add_adapters: layers._run,
}
"""Our operators that launch others."""
_WITHOUT_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "_reshape_alias"}


class AbsentGpu:
    """Counts `waits` by reason and line, `launches` by kernel or operator, and `uploads`, copies from the
    host.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self.uploads = 0
        self.pinned: set[int] = set()
        self.num_queued = 0
        """The number of things asked of the GPU, and how many of them are known to be done."""
        self.num_done = 0

    def wait(self, why: str, until: int | None = None) -> None:
        """Wait for the first `until` things, or for all."""
        self.num_done = self.num_queued if until is None else until
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(ROOT)]
        wraps = f"{ROOT}/engine/light_imports.py"  # torch calls its own functions through it
        foreign = ("site-packages", f"{sys.prefix}/bin/", wraps)  # a virtual environment may lie in the root
        frames = [frame for frame in frames if not any(place in frame.filename for place in foreign)]
        frames = [frame for frame in frames if frame.filename != __file__]
        ours = [frame for frame in frames if "/tests/" not in frame.filename] or frames
        self.waits[f"{ours[-1].filename.removeprefix(ROOT)}:{ours[-1].lineno} {ours[-1].line}: {why}"] += 1

    def launch(self, name: str) -> None:
        self.num_queued += 1
        self.launches[name] += 1

    def clear(self) -> None:
        self.waits.clear()
        self.launches.clear()
        self.uploads = 0


def _on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


class _Calls(TorchFunctionMode):
    """Handles calls that bypass the dispatcher, or that would fail without memory."""

    def __init__(self, gpu: AbsentGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "empty" and kwargs.pop("pin_memory", False):
            host = func(*args, **kwargs)
            self._gpu.pinned.add(host.untyped_storage().data_ptr())
            return host
        if name in ("tensor", "as_tensor") and torch.device(kwargs.get("device") or "cpu") == GPU:
            self._gpu.wait("a copy of a list")
        if not args or not _on_gpu(args[0]):
            return func(*args, **kwargs)
        if name in ("__getitem__", "__setitem__"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(each, list) for each in index):
                self._gpu.wait("a list as an index")
                index = tuple(
                    torch.empty(len(each), dtype=torch.int64, device=GPU) if isinstance(each, list) else each
                    for each in index
                )
                args = (args[0], index, *args[2:])
        if name in ("tolist", "numpy", "cpu"):
            self._gpu.wait("its values")
            host = torch.zeros(args[0].shape, dtype=args[0].dtype)
            return host if name == "cpu" else getattr(host, name)()
        if name in ("item", "__bool__", "__int__", "__float__", "__index__"):
            self._gpu.wait("its value")
            return 1
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, gpu: AbsentGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name == "nonzero" and _on_gpu(args[0]):
            self._gpu.wait("a shape that depends on values")
            return torch.empty(args[0].shape[0], args[0].ndim, dtype=torch.int64, device=GPU)
        if name == "_local_scalar_dense" and _on_gpu(args[0]):
            self._gpu.wait("its value")
            return 1
        if func in LAUNCHERS:  # it has a substitute for such tensors
            with self:
                return LAUNCHERS[func](*args, **kwargs)
        if name in ("index", "index_put_") and any(_on_gpu(i) and i.dtype is torch.bool for i in args[1]):
            self._gpu.wait("a shape that depends on values")
            return args[0]
        leaves = name == "copy_" and _on_gpu(args[1]) and not _on_gpu(args[0])
        result = args[0].zero_() if leaves else func(*args, **kwargs)
        if name in ("to", "_to_copy") and args[0].device != result.device:
            self._gpu.wait("a copy of memory that is not pinned")
        if name == "copy_" and args[0].device != args[1].device:
            self._gpu.uploads += _on_gpu(args[0])
            host = next(tensor for tensor in args[:2] if not tensor.is_meta)
            is_pinned = host.untyped_storage().data_ptr() in self._gpu.pinned
            if not is_pinned or not (kwargs.get("non_blocking") or args[2:] == (True,)):
                self._gpu.wait("a copy that blocks")
        elif name not in _WITHOUT_KERNEL and _is_computed(func, args, result):
            self._gpu.launch(name)
        return result


def _is_computed(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Return whether a result is on the GPU, and more than a view. Casts and reshapes are views or copies."""
    first = result[0] if isinstance(result, list | tuple) and len(result) else result
    if not _on_gpu(first):
        return False
    memory = first.untyped_storage()._cdata
    is_view = bool(args) and _on_gpu(args[0]) and memory == args[0].untyped_storage()._cdata
    return func._schema.is_mutable or not is_view


@contextmanager
def absent_gpu() -> Iterator[AbsentGpu]:
    gpu = AbsentGpu()

    class Event:
        """Replaces torch.cuda.Event."""

        def __init__(self, enable_timing: bool = False) -> None:
            self._after = 0
            self._enable_timing = enable_timing

        def record(self) -> None:
            self._after = gpu.num_queued

        def synchronize(self) -> None:
            if self._after > gpu.num_done:
                gpu.wait("an event", self._after)

        def elapsed_time(self, end: Event) -> float:
            """Return milliseconds. Raises an error if the end has not been reached."""
            assert self._enable_timing and end._enable_timing and end.query()
            return DEVICE_MS

        def query(self) -> bool:
            return self._after <= gpu.num_done

    def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
        gpu.launch(kernel.fn.__name__)

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(), _Calls(gpu), _Operators(gpu):
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(JITFunction, "run", run)
        yield gpu
