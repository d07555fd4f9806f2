"""The structs of `structs.h`, with `Args` after their names. They explain the fields."""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p


class SpanArgs(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("seat", "base", "start", "count", "certain", "tree_start")),
        ("masks", c_void_p),
    )


class SpansArgs(Structure):
    _fields_ = (
        ("spans", c_void_p),
        *((name, c_int64) for name in ("num_spans", "grid", "window", "threads")),
        ("parallel", c_void_p),
    )


class ConvArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("inputs", "weight", "bias", "out", "tail", "recent")),
        *((name, c_int64) for name in ("tail_step", "recent_step", "channels", "taps", "is_bf16")),
    )


class LinearArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "decay", "beta", "rates", "out")),
        *((name, c_void_p) for name in ("state", "keys", "deltas", "decays")),
        *((name, c_int64) for name in ("state_step", "keys_step", "deltas_step", "decays_step")),
        *((name, c_int64) for name in ("heads", "key_heads", "key_dim", "value_dim", "decay_dim")),
    )
