"""Adapters on a Transformers model's linear layers: a hook adds the rows' products to each layer's output."""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch.step_inputs import SequenceRows
from engine.linear.packed import operator
from engine.lora.table import NOTHING, AdaptedArgs, Adapters, PackedProduct, Weights
from native.build import load_library
from native.threads import gomp_parallel


@functools.cache
def kernel() -> Callable[..., None]:
    """Return the compiled `tandem_adapt`. Raises BuildError."""
    return load_library(Path(__file__).parent / "adapt.cpp").tandem_adapt


class Addition(Protocol):
    def add(self, out: Tensor, x: Tensor, path: str) -> None:
        """Add to a layer's output `out` [..., outputs], for its input `x` [..., inputs]."""


class AdaptedRows(NamedTuple):
    """An adapter's weights and its packed rows, int64."""

    weights: Weights
    rows: Tensor

    def add(self, out: Tensor, x: Tensor, path: str) -> None:
        """Add the adapter's product to its rows, like `Addition.add`."""
        product = self.weights.products.get(path)
        if isinstance(product, PackedProduct):
            _run_kernel(out, x, product, self.rows)
        elif product is not None:
            own = x.reshape(-1, x.shape[-1]).index_select(0, self.rows)
            out.view(-1, out.shape[-1]).index_add_(0, self.rows, own @ product.down.T @ product.up.T)


def groups_of(batch: Sequence[SequenceRows], adapters: Adapters) -> list[AdaptedRows]:
    """Return each adapter's rows; adapters are in the order of their first rows."""
    rows: dict[int, list[int]] = defaultdict(list)
    start = 0
    for each in batch:
        end = start + len(each.token_ids)
        if each.adapter not in (0, NOTHING):
            rows[each.adapter].extend(range(start, end))
        start = end
    return [
        AdaptedRows(adapters.weights(slot), torch.tensor(own, device=adapters.device))
        for slot, own in rows.items()
    ]


_current: Sequence[Addition] = ()
_attached: WeakSet[nn.Module] = WeakSet()


def begin_step(additions: Sequence[Addition]) -> None:
    """Set the additions of the layers of all models for the coming step."""
    global _current
    _current = additions


def attach(model: PreTrainedModel, adapters: Adapters) -> None:
    """Hook the model's layers, once for all runners, so that they add what `begin_step` set. A layer that
    replaces one later has no hook.
    """
    for path in adapters.linears:
        layer = model.get_submodule(path)
        if layer not in _attached:
            layer.register_forward_hook(functools.partial(_hook, path))
            _attached.add(layer)


def _hook(path: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    add_adapters(output, inputs[0], path)


def _run(out: Tensor, x: Tensor, path: str) -> None:
    for addition in _current:
        addition.add(out, x, path)


def _run_kernel(out: Tensor, x: Tensor, product: PackedProduct, rows: Tensor) -> None:
    x, whole = x.contiguous(), out.view(-1, out.shape[-1])
    part = product.part(range(product.outputs))
    adapted = AdaptedArgs(ctypes.addressof(part), 1, rows.data_ptr(), len(rows))
    threads, parallel = torch.get_num_threads(), gomp_parallel()
    stride = whole.stride(0)
    kernel()(x.data_ptr(), x.shape[-1], out.data_ptr(), stride, ctypes.byref(adapted), 1, threads, parallel)


add_adapters = operator(
    "add_adapters(Tensor(a!) out, Tensor x, str path) -> ()", _run, lambda out, x, path: None
)
