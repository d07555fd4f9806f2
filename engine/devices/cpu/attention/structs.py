"""The structs of `step.h`, with `Args` after their names. It explains the fields."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p


class KvLayerArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, c_int64) for name in ("key_stride", "value_stride", "num_kv_heads", "key_dim", "value_dim")),
    )


class PoolArgs(Structure):
    _fields_ = (
        ("layers", c_void_p),
        *((name, c_int64) for name in ("num_layers", "block_stride", "num_blocks", "block_size")),
        *((name, c_int64) for name in ("is_bf16", "stored")),
    )


class StepArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query_start", "context_len", "block_table", "slots")),
        *((name, c_void_p) for name in ("visible", "tree_start", "first_key")),
        *((name, c_int64) for name in ("table_stride", "num_sequences", "total_tokens", "threads")),
        ("parallel", c_void_p),
    )


class CallArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("query", "key", "value", "out")),
        *((name, c_int64) for name in ("query_token", "query_head", "key_token", "key_head")),
        *((name, c_int64) for name in ("value_token", "value_head", "out_token", "out_head")),
        *((name, c_int64) for name in ("layer", "num_heads", "window")),
        ("scale", c_double),
        ("softcap", c_double),
        ("sinks", c_void_p),
    )
