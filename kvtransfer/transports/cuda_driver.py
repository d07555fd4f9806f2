"""CUDA's driver API for memory that processes share (CUDA IPC). Only `Driver` calls the library."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import byref
from dataclasses import dataclass
from typing import NamedTuple

import torch

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class Allocation(NamedTuple):
    """Allocated memory of a device: `nbytes` bytes from `address` on."""

    address: int
    nbytes: int


class Driver:
    """The calls of CUDA's driver in the context that torch uses on `device`. For any thread.

    Raises OSError, with the driver's name of the error.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", byref(number), ctypes.c_int(device.index or 0))
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), number)  # torch keeps it, too

    def allocation(self, address: int) -> Allocation:
        """Return the allocation, or the mapping of a peer's, that holds this address."""
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        with self._current():
            self._call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), ctypes.c_uint64(address))
        return Allocation(base.value, nbytes.value)

    def export(self, allocation: int) -> bytes:
        """Return the handle with which other processes map the allocation of this address."""
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", byref(handle), ctypes.c_uint64(allocation))
        return bytes(handle.reserved)

    def map(self, handle: bytes) -> int:
        """Map another process's allocation; return its address here."""
        address = ctypes.c_uint64()
        given = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
        with self._current():
            flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
            self._call("cuIpcOpenMemHandle_v2", byref(address), given, flags)
        return address.value

    def unmap(self, address: int) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, runs: Iterable[tuple[int, int, int]], stream: int) -> None:
        """Start to copy in the stream, for each run: its target, its source, the number of bytes."""
        with self._current():
            for target, source, nbytes in runs:
                self._call(
                    "cuMemcpyAsync",
                    ctypes.c_uint64(target),
                    ctypes.c_uint64(source),
                    ctypes.c_size_t(nbytes),
                    ctypes.c_void_p(stream),
                )

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the context the calling thread's: a thread of ours has none."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), byref(text))
            raise OSError(f"{name}: {(text.value or b'').decode() or f'error {code}'}")


@dataclass
class _Mapped:
    allocation: Allocation
    users: int = 0


class Mappings:
    """Peers' allocations that this process maps: each once, however many connections read from it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._mapped: dict[bytes, _Mapped] = {}

    def open(self, handle: bytes) -> Allocation:
        """Map an allocation until as many calls of `close`. Raises OSError."""
        with self._lock:
            if handle not in self._mapped:
                address = self._driver.map(handle)
                try:
                    self._mapped[handle] = _Mapped(self._driver.allocation(address))
                except OSError:
                    self._driver.unmap(address)
                    raise
            mapped = self._mapped[handle]
            mapped.users += 1
            return mapped.allocation

    def close(self, handle: bytes) -> None:
        with self._lock:
            mapped = self._mapped[handle]
            mapped.users -= 1
            if not mapped.users:
                del self._mapped[handle]
                self._driver.unmap(mapped.allocation.address)
