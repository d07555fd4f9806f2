"""The memory of weights that Transformers reads straight to a GPU.

Transformers allocates it as one piece, which saves a part of a second. But the CUDA decoder then joins the
weights that read one input, and nothing that this frees in the piece can be given back: of 32 B parameters in
bfloat16, 13 of 79 GB. A weight with memory of its own is given back as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import modeling_utils

_ALLOCATE_ALL = "caching_allocator_warmup"


@contextmanager
def memory_of_their_own() -> Iterator[None]:
    """Let Transformers allocate each weight alone, in releases that have this private function."""
    allocate_all = getattr(modeling_utils, _ALLOCATE_ALL, None)
    if allocate_all is None:
        yield
        return
    setattr(modeling_utils, _ALLOCATE_ALL, lambda *_: None)
    try:
        yield
    finally:
        setattr(modeling_utils, _ALLOCATE_ALL, allocate_all)
