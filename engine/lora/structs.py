"""The structs of `adapt.h`, with `Args` after their names. It explains the fields."""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p


class PartArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("down", "up")),
        *((name, c_int64) for name in ("rank", "inputs", "begin", "end", "first")),
    )


class AdaptedArgs(Structure):
    _fields_ = (("parts", c_void_p), ("num_parts", c_int64), ("rows", c_void_p), ("count", c_int64))
