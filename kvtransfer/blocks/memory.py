"""Memory for KV pools: private, or shared with processes of the same host that were handed its descriptor.

With huge pages an attention kernel that walks a large pool needs far fewer address translations. Linux gives
them to private memory on request, and to shared memory only if an administrator set
`/sys/kernel/mm/transparent_hugepage/shmem_enabled` to `advise`.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

_SEAL_FUTURE_WRITE = 0x0010
"""`F_SEAL_FUTURE_WRITE`, which Python's `fcntl` does not name: only mappings made before it may write."""


class PoolMemory:
    """Anonymous memory: `buffer` is a writable view of `nbytes` zeros, `fd` the file behind it if `shared`.

    No name in any file system: after a SIGKILL nothing is left behind. The size is sealed, so that a peer
    which maps it can't be hit by its truncation. Only `buffer` can write to it (from Linux 5.1 on). `fd` is
    None where the platform has no `memfd_create`.
    """

    def __init__(self, nbytes: int, *, shared: bool = True) -> None:
        if nbytes < 1:
            raise ValueError(f"nbytes must be positive, not {nbytes}")
        self.nbytes = nbytes
        self.fd: int | None = None
        if shared and hasattr(os, "memfd_create"):
            self.fd = os.memfd_create("tandem-kv-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            pages = mmap.mmap(self.fd, nbytes)
            with contextlib.suppress(OSError):  # an old kernel
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        else:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel built without them
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = memoryview(pages)

    def close(self) -> None:
        """Drop this object's hold. The memory itself goes when the last view of it does. Idempotent."""
        self.buffer = memoryview(b"")
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def allocate(nbytes: int, *, shared: bool = True) -> PoolMemory:
    """`nbytes` zeroed bytes for a pool, physically allocated as they are first touched."""
    return PoolMemory(nbytes, shared=shared)


def map_peer_pool(fd: int, nbytes: int) -> mmap.mmap:
    """Map another process's pool, read-only. Raises OSError where it is too small or could be truncated."""
    if os.fstat(fd).st_size < nbytes:
        raise OSError(f"the peer's pool file is smaller than the {nbytes} bytes that it announced")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise OSError("the peer's pool file is not sealed against truncation")
    return mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
