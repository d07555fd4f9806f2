"""The Python side of the CPU kernel, which passes pointers and strides once a step and once a layer.

`step.h` explains the structs, which have the same names without `Args`.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Sequence
from ctypes import Structure
from pathlib import Path

import torch
from torch import Tensor

from engine.kv.attention import AttentionMetadata, AttentionOptions, LayerKv, NativeBackend, check_rows
from engine.kv.row_codes import KvRows
from native.build import BuildError, address_of, load_library
from native.structs import fields
from native.threads import gomp_parallel
from protocol.handoff import ROW_QUANTIZATIONS

_STRUCTS = Path(__file__).parent / "step.h"


class KvLayerArgs(Structure):
    _fields_ = fields(_STRUCTS, "KvLayer")


class PoolArgs(Structure):
    _fields_ = fields(_STRUCTS, "Pool")


class StepArgs(Structure):
    _fields_ = fields(_STRUCTS, "Step")


class CallArgs(Structure):
    _fields_ = fields(_STRUCTS, "Call")


logger = logging.getLogger("tandem.engine")

_STORED = ("none", ROW_QUANTIZATIONS["int8"], ROW_QUANTIZATIONS["fp8"])
"""The values of `Stored` in step.h, in its order."""


@functools.cache
def load() -> ctypes.CDLL:
    """Load the compiled kernel. Raises BuildError."""
    return load_library(Path(__file__).parent / "attention.cpp")


@functools.cache
def build_fault() -> str | None:
    """Return why the kernel can't be built on this machine, or None."""
    try:
        load()
    except BuildError as error:
        logger.warning("CPU attention falls back to torch's operators: %s", error)
        return str(error)
    return None


class CpuBackend(NativeBackend):
    """A backend that reads blocks in place: float32 and bfloat16 on the CPU, plain or coded. Sums are
    float32, or exact for rows coded in int8.

    A row's result has the same bits whichever other rows are in the step, with any number of threads, and as
    a decode row or in a prefill chunk.
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
        return self._kernel, address_of(self._library.tandem_attention_begin), address_of(self._run)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Begin a step. Raises ValueError if the metadata are out of range."""
        optional = (metadata.visible, metadata.tree_start, metadata.first_key)
        self._metadata = metadata  # the kernel reads this memory until the next step
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
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
        if query_strides[2] != 1 or key_strides[2] != 1 or value_strides[2] != 1:
            query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
            query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        if self._metadata is None:
            raise RuntimeError("begin_step must come before forward")
        if not 0 <= layer < len(self._layers):
            raise ValueError(f"layer {layer} is not among the pool's {len(self._layers)}")
        check_rows(query, key, value, self._num_rows, _dims(self._layers[layer]), self._rows)
        sinks = options.sinks
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
            options.window,
            options.scale,
            options.softcap,
            None if sinks is None else sinks.data_ptr(),
        )
        self._run(self._kernel, ctypes.byref(call))
        return out


def _dims(layer: LayerKv) -> tuple[int, int, int]:
    """Return a layer's KV heads, and the sizes of its keys and values."""
    return *layer.keys.shape[2:], layer.values.shape[3]


def _layer_args(layer: LayerKv) -> KvLayerArgs:
    return KvLayerArgs(
        *(None if each is None else each.data_ptr() for each in layer),
        *(side.values.stride(1) for side in layer.sides),
        *_dims(layer),
    )
