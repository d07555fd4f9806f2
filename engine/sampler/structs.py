"""The structs of `chooser.h` and `choose.cpp`, with `Args` after their names. They explain the fields."""

from __future__ import annotations

from ctypes import Structure, c_double, c_float, c_int64, c_void_p


class SamplingArgs(Structure):
    _fields_ = (
        ("seed", c_int64),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("temperature", c_float),
        ("min_p_floor", c_float),
    )


class LogitsArgs(Structure):
    _fields_ = (
        ("logits", c_void_p),
        *((name, c_int64) for name in ("stride", "size", "count")),
        *((name, c_void_p) for name in ("requests", "numbers", "positions", "chosen", "masks")),
    )


class DraftedArgs(Structure):
    _fields_ = (("rows", LogitsArgs), ("starts", c_void_p), ("distributions", c_void_p))
