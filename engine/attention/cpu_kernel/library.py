"""The compiled kernel's functions and their types."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from engine.native.build import BuildError, build


@functools.cache
def load() -> ctypes.CDLL:
    """The loaded library. Raises BuildError."""
    path = build(Path(__file__).parent / "attention.cpp")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path}: {error}") from error
    library.tandem_attention_create.argtypes = [ctypes.c_void_p]
    library.tandem_attention_create.restype = ctypes.c_void_p
    library.tandem_attention_destroy.argtypes = [ctypes.c_void_p]
    library.tandem_attention_destroy.restype = None
    library.tandem_attention_begin.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.tandem_attention_begin.restype = ctypes.c_char_p
    library.tandem_attention_forward.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    library.tandem_attention_forward.restype = None
    return library
