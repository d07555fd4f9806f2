from __future__ import annotations

import ctypes
from pathlib import Path

from native.build import load_library
from tests.engine.kernels import needs_kernel

MIB = 1 << 20


def flags_of(address: int) -> list[str]:
    """Return the flags of the mapping that contains the address; none if it is not mapped."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            start, end = (int(each, 16) for each in name.split("-"))
            found = start <= address < end
        elif found and name == "VmFlags:":
            return values
    return []


@needs_kernel
def test_large_buffers_get_huge_pages_and_return_them_in_any_order() -> None:
    """The heap keeps freed memory below memory in use, and takes large blocks once one was freed."""
    library = load_library(Path(__file__).parent / "large_buffers.cpp")
    make, free = library.tandem_make_buffer, library.tandem_free_buffer
    free(make(5 * MIB), 5 * MIB)
    buffers = [make(3 * MIB) for _ in range(8)]
    assert all(buffer % (2 * MIB) == 0 and "hg" in flags_of(buffer) for buffer in buffers)
    for buffer in buffers[:-1]:
        ctypes.memset(buffer, 1, 3 * MIB)
        free(buffer, 3 * MIB)
        assert not flags_of(buffer)
    free(buffers[-1], 3 * MIB)
