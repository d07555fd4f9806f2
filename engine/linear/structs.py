"""The structs that `quantized.h` and `routed.h` read, with `Args` after their names.

Those explain the fields.
"""

from __future__ import annotations

from ctypes import Structure, c_int64, c_void_p


class QuantizedArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("words", "scales", "offsets", "inputs", "bias")),
        *((name, c_int64) for name in ("in_features", "out_features", "group", "format", "input_group")),
    )


class RoutedArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "experts", "out")),
        *((name, c_int64) for name in ("rows", "sharing", "num_experts", "in_features", "out_features")),
    )
