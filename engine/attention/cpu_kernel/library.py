"""The compiled kernel's functions and their types."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from engine.attention.cpu_kernel.structs import Call, KvLayer, Pool, Step
from native.build import load_library


@functools.cache
def load() -> ctypes.CDLL:
    """The loaded library. Raises BuildError."""
    library = load_library(Path(__file__).parent / "attention.cpp", KvLayer, Pool, Step, Call)
    library.tandem_attention_create.argtypes = [ctypes.c_void_p]
    library.tandem_attention_create.restype = ctypes.c_void_p
    library.tandem_attention_destroy.argtypes = [ctypes.c_void_p]
    library.tandem_attention_destroy.restype = None
    library.tandem_attention_begin.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.tandem_attention_begin.restype = ctypes.c_char_p
    library.tandem_attention_forward.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.tandem_attention_forward.restype = None
    return library
