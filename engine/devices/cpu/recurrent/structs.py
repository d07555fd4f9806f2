"""The structs of `structs.h`, with `Args` after their names. It explains the fields."""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p


class SpanArgs(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("state_slot", "base", "start", "count", "certain", "tree_start")),
        ("masks", c_void_p),
    )


class SpansArgs(Structure):
    _fields_ = (
        ("spans", c_void_p),
        *((name, c_int64) for name in ("num_spans", "grid", "window", "threads")),
        ("parallel", c_void_p),
    )


class SlotArrayArgs(Structure):
    _fields_ = (("first", c_void_p), ("step", c_int64))


class LayerStateSlotsArgs(Structure):
    _fields_ = (
        *((name, SlotArrayArgs) for name in ("state", "tail", "inputs", "keys", "deltas", "decays")),
        *((name, c_int64) for name in ("channels", "taps", "is_bf16")),
        *((name, c_int64) for name in ("heads", "key_heads", "key_dim", "value_dim", "decay_dim")),
    )


class ConvArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("state_slots", "inputs", "weight", "bias", "out")),
        ("input_step", c_int64),
    )


class LinearAttentionArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("state_slots", "query", "key", "value")),
        *((name, c_void_p) for name in ("decay", "beta", "rates", "out")),
        *((name, c_int64) for name in ("query_step", "key_step", "value_step")),
    )
