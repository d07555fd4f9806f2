"""The attention backends by name, which one serves a device and dtype, and attention over block tables."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from engine.kv.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionOptions,
    CapturableBackend,
    LayerKv,
)
from engine.kv.layout import Group
from protocol.config import ServeConfig

BACKENDS = {
    "cpu": "engine.devices.cpu.attention.backend:CpuBackend",
    "triton": "engine.devices.cuda.attention.backend:TritonBackend",
    "flash": "engine.devices.cuda.attention.flash:FlashBackend",
    "sdpa": "engine.devices.torch.attention:SdpaBackend",
    "torch": "engine.devices.torch.attention:TorchBackend",
}
"""The class of each, imported when it is asked for: Triton is not there on every host."""


def backend_of(name: str) -> type[AttentionBackend]:
    """Raises ImportError where its library is not there."""
    module, _, attribute = BACKENDS[name].partition(":")
    backend: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
    return backend


def kernel_of(device: torch.device) -> str:
    """Name the backend that reads this device's KV blocks in place."""
    return "cpu" if device.type == "cpu" else "triton"


def backend_fault(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> str | None:
    """Tell why a backend can't serve this device and dtype; None if it can."""
    try:
        return backend_of(name).fault(device, dtype)
    except ImportError as error:
        return f"it needs the package {error.name}"


def select_backend(
    device: torch.device, dtype: torch.dtype, requested: str | None = None, *, deterministic: bool = True
) -> tuple[type[AttentionBackend], str]:
    """Return the backend's class and the reason for the choice, to be logged.

    `requested` None or "auto" takes the device's kernel, or torch's operators without one; unless it must be
    `deterministic`, with a library's kernel for chunks of prompts if one fits. Raises ValueError when it is
    unknown or cannot serve this device and dtype.
    """
    if requested is not None and requested != "auto":
        if requested not in BACKENDS:
            raise ValueError(f"unknown attention backend {requested!r}; known: {', '.join(BACKENDS)}")
        if fault := backend_fault(requested, device, dtype):
            raise ValueError(f"attention backend {requested!r}: {fault}")
        return backend_of(requested), "requested"
    name = kernel_of(device)
    # A CPU's server does not ask: the import of the backend's module, and so of Triton, takes 67 MB.
    if name == "triton" and not deterministic and backend_fault("flash", device, dtype) is None:
        return backend_of("flash"), "FlashAttention-3 for chunks of prompts that it fits, else our kernel"
    if fault := backend_fault(name, device, dtype):
        return backend_of("torch"), fault
    return backend_of(name), "reads the KV blocks in place"


def backend_for(
    config: ServeConfig, device: torch.device, dtype: torch.dtype
) -> tuple[type[AttentionBackend], str]:
    return select_backend(device, dtype, config.attention_backend, deterministic=config.deterministic)


class TablesBackend(AttentionBackend):
    """Attention over all layers of a group. The metadata have the block table [num_tables, num_seqs,
    max_blocks] and the slots [num_tables, total_tokens] of each table.
    """

    def __init__(self, backends: Sequence[AttentionBackend], tables: Sequence[int]) -> None:
        """`backends` has one of all layers for each table; `tables` has the table of each layer."""
        first, self.num_tables = backends[0], len(backends)
        self.name, self.block_size = first.name, first.block_size
        self.can_capture, self.deterministic = first.can_capture, first.deterministic
        self.backends, self.tables = backends, tables
        self._by_layer = [backends[table] for table in tables]

    def plan(self, metadata: AttentionMetadata) -> None:
        for backend in self.backends:
            backend.plan(metadata)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        tables = zip(self.backends, metadata.block_table, metadata.slot_mapping, strict=True)
        for backend, block_table, slots in tables:
            backend.begin_step(replace(metadata, block_table=block_table, slot_mapping=slots))

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        return self._by_layer[layer].forward(layer, query, key, value, options)


def backend_over(
    backend: type[AttentionBackend], layers: Sequence[LayerKv], group: Group
) -> AttentionBackend:
    """Return attention over these layers of a pool, which are the group's."""
    backends = [backend(layers, group.rows) for _ in group.windows]
    if len(backends) == 1:
        return backends[0]
    return TablesBackend(backends, [place.table for place in group.layers])


def by_table(backend: AttentionBackend) -> tuple[Sequence[AttentionBackend], Sequence[int] | None]:
    """Return the backend of each block table, and the table of each layer; None where all lie in one."""
    if isinstance(backend, TablesBackend):
        return backend.backends, backend.tables
    return [backend], None


def capturable(backends: Sequence[AttentionBackend]) -> list[CapturableBackend]:
    """Return the backends, all of which `can_capture`."""
    found = [each for each in backends if isinstance(each, CapturableBackend)]
    assert len(found) == len(backends)
    return found
