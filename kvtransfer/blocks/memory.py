"""Memory for KV pools: private, or shared with processes of the host that receive its descriptor.

An attention kernel that walks a large pool needs far fewer address translations on huge pages: scattered
reads take a sixth less time. Linux gives huge pages to private memory on request. To shared memory it gives
them at first touch only if an administrator allowed that
(`/sys/kernel/mm/transparent_hugepage/shmem_enabled`), but from 6.1 on it turns pages in use into huge ones on
request (`MADV_COLLAPSE`), with any setting.

Linux clears a page when it is first touched, which takes a tenth of a prompt's time on some machines. So a
thread allocates the pages just ahead of their use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np

logger = logging.getLogger("tandem.kvtransfer")

_SEAL_FUTURE_WRITE = 0x0010
"""`F_SEAL_FUTURE_WRITE`, which Python's `fcntl` lacks: new mappings of the file are read-only."""
_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 * 1024 * 1024
_AHEAD_BYTES = 16 * 1024 * 1024
_LOOK_S = 0.05

_libc = ctypes.CDLL(None, use_errno=True)  # calls through it release the GIL; those of Python's `mmap` do not


class PoolMemory:
    """Anonymous memory: `buffer` is a writable view of `nbytes` zeros, `fd` the file that backs it if
    `shared`.

    Pages are allocated at first touch, or ahead of it (`stay_ahead`). The file has no name, so a SIGKILL
    leaves nothing. Its size is sealed: no truncation can crash a peer that maps it. Only `buffer` and the
    processes that it was lent to can write to it (from Linux 5.1 on). The memory and `fd` are freed with the
    last view of `buffer`.
    """

    def __init__(
        self, nbytes: int, *, shared: bool = True, lend: Callable[[int], None] | None = None
    ) -> None:
        """`lend` passes `fd` to other processes that may write, and returns when they have mapped it."""
        if nbytes < 1:
            raise ValueError(f"nbytes must be positive, not {nbytes}")
        self.nbytes = nbytes
        self.fd: int | None = None
        if shared:
            self.fd, self.buffer = _shared(nbytes, lend)
        else:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _advise_huge_pages(pages)
            self.buffer = memoryview(pages)

    def stay_ahead(self, used: Callable[[], int | None]) -> None:
        """Allocate huge pages ahead of use, in a thread that ends with the last view of `buffer`.

        The memory is used from the front on. `used` returns the number of bytes in use, or None to end.
        """
        pages = weakref.ref(self.buffer.obj)
        address = int(np.frombuffer(self.buffer, np.uint8).ctypes.data)
        allocate = _populate if self.fd is None else _collapse
        arguments = (pages, address, self.nbytes // _HUGE_PAGE * _HUGE_PAGE, allocate, used)
        threading.Thread(target=_stay_ahead, args=arguments, name="kv-pages", daemon=True).start()

    def close(self) -> None:
        """Release this object's reference to the memory. Idempotent."""
        self.buffer = memoryview(b"")
        self.fd = None


def map_peer_pool(fd: int, nbytes: int) -> mmap.mmap:
    """Map another process's pool, read-only. Raises OSError if it is too small or could be truncated."""
    if os.fstat(fd).st_size < nbytes:
        raise OSError(f"the peer's pool file is smaller than the {nbytes} bytes that it announced")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("the peer's pool file is not sealed against truncation")
    return mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)


def _shared(nbytes: int, lend: Callable[[int], None] | None) -> tuple[int, memoryview]:
    """Return a sealed file of `nbytes` zeros in memory, and its view from the start of a huge page."""
    fd = os.memfd_create("tandem-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    pages = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    weakref.finalize(pages, os.close, fd)
    base = int(np.frombuffer(pages, np.uint8).ctypes.data)
    start = -base % _HUGE_PAGE
    _map_over(base + start, nbytes, fd)
    if lend is not None:
        lend(fd)
    with contextlib.suppress(OSError):  # an old kernel
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
    _advise_huge_pages(pages)
    return fd, memoryview(pages)[start : start + nbytes]


def _map_over(address: int, nbytes: int, fd: int) -> None:
    """Map the file over a part of an anonymous mapping. Python's `mmap` object unmaps both together."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    call = _libc.mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    if call(address, nbytes, protection, flags, fd, 0) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _advise_huge_pages(pages: mmap.mmap) -> None:
    with contextlib.suppress(OSError):  # a kernel built without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)


def _stay_ahead(
    pages: weakref.ref[mmap.mmap],
    address: int,
    nbytes: int,
    allocate: Callable[[int], int],
    used: Callable[[], int | None],
) -> None:
    done = 0
    while done < nbytes:
        held, in_use = pages(), used()
        if held is None or in_use is None:
            return
        if done >= in_use + _AHEAD_BYTES:
            del held
            time.sleep(_LOOK_S)
            continue
        if allocate(address + done) == errno.EINVAL:
            logger.warning(
                "the KV pool gets its pages when they are first used, which is slower: pages ahead of use "
                "need Linux 5.14, and huge ones of shared memory Linux 6.1, or `advise` in "
                "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
            )
            return
        done += _HUGE_PAGE


def _populate(page: int) -> int:
    """Allocate a private huge page. Return 0 or the error's number."""
    return _madvise(page, _MADV_POPULATE_WRITE)


def _collapse(page: int) -> int:
    """Allocate a shared page, and turn it into a huge one if one is free. Return 0 or the error's number."""
    ctypes.string_at(page, 1)  # a range without any page is not collapsed
    return _madvise(page, _MADV_COLLAPSE)


def _madvise(page: int, advice: int) -> int:
    arguments = ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE), ctypes.c_int(advice)
    return 0 if _libc.madvise(*arguments) == 0 else ctypes.get_errno()
