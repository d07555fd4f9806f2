"""The struct that `quantized.h` reads, with `Args` after its name. It explains the fields."""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p


class QuantizedArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("words", "scales", "offsets", "inputs", "bias")),
        *((name, c_int64) for name in ("in_features", "out_features", "group", "format")),
    )
