"""Compiles Triton kernels for absent devices, from the backend's launches on tensors without memory, and
reads the machine code.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class _Absent:
    """A Triton driver for an absent device."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # Triton caches compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def absent_driver(capability: int) -> Iterator[None]:
    driver = triton.runtime.driver
    before, driver._active = driver._active, _Absent(capability)
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def launches(capability: int) -> Iterator[list[Any]]:
    """Collect the compiled kernels of the launches inside the block, without running any."""
    run, compiled = JITFunction.run, []

    def compile_alone(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = compile_alone
    try:
        with absent_driver(capability):
            yield compiled
    finally:
        JITFunction.run = run


@dataclass(frozen=True)
class Code:
    """Figures of a kernel's machine code."""

    threads: int
    registers: int
    spills: int
    """Instructions that spill registers or restore them."""
    shared_bytes: int
    wide_copies: int
    """Asynchronous copies from global to shared memory of 128 bits per thread."""
    products: int
    """Matrix products."""

    @classmethod
    def of(cls, kernel: Any) -> Code:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage, code = (_cuobjdump(option, file.name) for option in ("-res-usage", "-sass"))

        def count(pattern: str) -> int:
            return len(re.findall(rf"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?(?:{pattern})", code, re.MULTILINE))

        return cls(
            threads=32 * kernel.metadata.num_warps,
            registers=int(re.findall(r"REG:(\d+)", usage)[0]),
            spills=count(r"LDL|STL"),
            shared_bytes=kernel.metadata.shared,
            wide_copies=count(r"LDGSTS\S*\.128"),
            products=count(r"HMMA|HGMMA|UTCHMMA"),
        )


@dataclass(frozen=True)
class Device:
    name: str
    shared_bytes: int
    """The shared memory that a program may have. A multiprocessor has 1 KiB more, and reserves 1 KiB for each
    program.
    """
    threads: int = 2048
    """Threads of a multiprocessor."""
    most_programs: int = 32

    def programs(self, code: Code) -> int:
        """Return how many programs run on a multiprocessor at a time."""
        registers = -(-code.registers // 8) * 8 * code.threads
        shared = (self.shared_bytes + 1024) // (code.shared_bytes + 1024)
        return min(65536 // registers, shared, self.threads // code.threads, self.most_programs)


DEVICES = {
    80: Device("A100", 163 << 10),
    89: Device("L4", 99 << 10, 1536, 24),
    90: Device("H100", 227 << 10),
    100: Device("B200", 227 << 10),
    120: Device("RTX 5090", 99 << 10, 1536, 24),
}
"""By compute capability."""


def _cuobjdump(option: str, path: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
