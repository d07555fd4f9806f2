"""The Python side of the CPU kernel: hands it pointers and strides, once a step and once a layer."""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.devices.cpu.attention.structs import CallArgs, KvLayerArgs, PoolArgs, StepArgs
from engine.kv.attention import AttentionBackend, AttentionMetadata, LayerKv
from engine.kv.row_codes import KvRows
from native.build import BuildError, declare, load_library
from native.threads import gomp_parallel
from protocol.handoff import ROW_QUANTIZATIONS

logger = logging.getLogger("tandem.engine")

_STORED = ("none", ROW_QUANTIZATIONS["int8"], ROW_QUANTIZATIONS["fp8"])
"""`Stored` of step.h."""


@functools.cache
def load() -> ctypes.CDLL:
    """Load the compiled kernel. Raises BuildError."""
    library = load_library(Path(__file__).parent / "attention.cpp", KvLayerArgs, PoolArgs, StepArgs, CallArgs)
    pointer = ctypes.c_void_p
    declare(library, "tandem_attention_create", pointer, pointer)
    declare(library, "tandem_attention_destroy", None, pointer)
    declare(library, "tandem_attention_begin", ctypes.c_char_p, pointer, pointer)
    declare(library, "tandem_attention_forward", None, pointer, pointer)
    return library


@functools.cache
def build_fault() -> str | None:
    """Tell why the kernel can't be had on this machine; None if it can."""
    try:
        load()
    except BuildError as error:
        logger.warning("CPU attention falls back to torch's operators: %s", error)
        return str(error)
    return None


class CpuBackend(AttentionBackend):
    """Reads the blocks in place; float32 and bfloat16 on the CPU, as they are or as codes. Sums are float32,
    or exact where rows are coded in int8.

    A row's result has the same bits whatever shares the step with it, whatever the number of threads, and
    whether it is computed as a decode row or in a prefill chunk.
    """

    name = "cpu"

    @classmethod
    def fault(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"the cpu kernel does not run on {device.type}"
        if dtype not in (torch.float32, torch.bfloat16):
            return f"the cpu kernel does not take {dtype}"
        return build_fault()

    def __init__(self, layers: Sequence[LayerKv], rows: KvRows | None = None) -> None:
        first = layers[0].keys
        self._rows = rows or KvRows(first.dtype)
        self.parallel = gomp_parallel()
        """The address of the function that runs work on several threads (native/parallel.h)."""
        if self._rows.dtype not in (torch.float32, torch.bfloat16) or not layers[0].fits(self._rows):
            raise ValueError(f"layers of {first.dtype} are not rows of {self._rows} that the kernel reads")
        num_blocks, self.block_size, _, _ = first.shape
        self._library = load()
        self._layers = list(layers)
        self._num_rows = 0
        copied = (KvLayerArgs * len(layers))(*map(_layer_args, layers))
        described = PoolArgs(
            ctypes.addressof(copied),
            len(layers),
            first.stride(0),
            num_blocks,
            self.block_size,
            self._rows.dtype is torch.bfloat16,
            _STORED.index(self._rows.quantization),
        )
        self._kernel: int = self._library.tandem_attention_create(ctypes.byref(described))
        weakref.finalize(self, self._library.tandem_attention_destroy, self._kernel)
        self._step = StepArgs()
        self._run = self._library.tandem_attention_forward
        self._metadata: AttentionMetadata | None = None

    @property
    def addresses(self) -> tuple[int, int, int]:
        """The kernel's state, and its functions that begin a step and attend, for native callers."""
        functions = (self._library.tandem_attention_begin, self._run)
        begin, attend = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        return self._kernel, begin, attend

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Raises ValueError where the metadata are out of range."""
        optional = (metadata.visible, metadata.tree_start, metadata.first_key)
        self._metadata = metadata  # the kernel reads its memory until the next step
        rows = metadata.slot_mapping.shape[0]
        self._num_rows = rows
        num_seqs, max_blocks = metadata.block_table.shape
        self._step = StepArgs(
            metadata.query_start.data_ptr(),
            metadata.context_len.data_ptr(),
            metadata.block_table.data_ptr(),
            metadata.slot_mapping.data_ptr(),
            *(None if t is None else t.data_ptr() for t in optional),
            max_blocks,
            num_seqs,
            rows,
            torch.get_num_threads(),
            self.parallel,
        )
        wrong = self._library.tandem_attention_begin(self._kernel, ctypes.byref(self._step))
        if wrong:
            self._metadata = None
            raise ValueError(f"attention metadata: {wrong.decode()} is out of range")

    def forward(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
        if query_strides[2] != 1 or key_strides[2] != 1 or value_strides[2] != 1:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
            query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        self._check(layer, query, key, value)
        if sinks is not None:
            if sinks.shape != query.shape[1:2]:
                raise ValueError(f"sinks {tuple(sinks.shape)} are not one for each of {query.shape[1]} heads")
            sinks = sinks.float().contiguous()
        call = CallArgs(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            out.data_ptr(),
            *query_strides[:2],
            *key_strides[:2],
            *value_strides[:2],
            *out.stride()[:2],
            layer,
            query.shape[1],
            sliding_window or 0,
            scale,
            softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
        )
        self._run(self._kernel, ctypes.byref(call))
        return out

    def _check(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Refuse what the kernel would read or write out of bounds."""
        if self._metadata is None:
            raise RuntimeError("begin_step must come before forward")
        if not 0 <= layer < len(self._layers):
            raise ValueError(f"layer {layer} is not among the pool's {len(self._layers)}")
        rows, (kv_heads, key_dim, value_dim) = self._num_rows, _shape(self._layers[layer])
        keys, values = (rows, kv_heads, key_dim), (rows, kv_heads, value_dim)
        if key.shape != keys or value.shape != values:
            raise ValueError(
                f"key {tuple(key.shape)} and value {tuple(value.shape)} are not {keys} and {values}"
            )
        if query.shape[::2] != keys[::2] or query.shape[1] % kv_heads:
            raise ValueError(f"query {tuple(query.shape)} does not fit keys {keys}")
        if not query.dtype is key.dtype is value.dtype is self._rows.dtype:
            raise ValueError(f"query, key and value must be of the pool's {self._rows.dtype}")


def _shape(layer: LayerKv) -> tuple[int, int, int]:
    """A layer's KV heads, and the sizes of their keys and values."""
    return *layer.keys.shape[2:], layer.values.shape[3]


def _layer_args(layer: LayerKv) -> KvLayerArgs:
    return KvLayerArgs(
        *(None if each is None else each.data_ptr() for each in layer),
        *(side.values.stride(1) for side in layer.sides),
        *_shape(layer),
    )
