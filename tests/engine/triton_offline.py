"""Triton's kernels compiled for devices that are not there, from the launches that the backend makes of
tensors without memory, and what their machine code says.
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

SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""What a program may have, by compute capability: A100, L4, H100, B200, RTX 5090."""


class _Absent:
    """What Triton asks of a driver, of a device that is not there."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # Triton remembers what it compiled by the device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def launches(capability: int) -> Iterator[list[Any]]:
    """Lists the compiled kernels of the launches that are made inside, of which none is run."""
    run, compiled = JITFunction.run, []

    def compile_alone(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver = triton.runtime.driver
    before, driver._active = driver._active, _Absent(capability)
    JITFunction.run = compile_alone
    try:
        yield compiled
    finally:
        JITFunction.run = run
        driver._active = before


@dataclass(frozen=True)
class Code:
    """Of a kernel's machine code."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    async_copies: int
    """Of 128 bits each, from global memory to shared memory."""
    narrow_copies: int
    products: int
    """Of matrices."""
    wide_loads: int

    @classmethod
    def of(cls, kernel: Any) -> Code:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage, code = (_cuobjdump(option, file.name) for option in ("-res-usage", "-sass"))
        numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}

        def count(pattern: str) -> int:
            return len(re.findall(rf"^\s+/\*\w+\*/\s+(?:@!?U?P\w+ )?{pattern}", code, re.MULTILINE))

        return cls(
            registers=numbers["REG"],
            spilled_bytes=numbers["STACK"] + numbers["LOCAL"],
            shared_bytes=kernel.metadata.shared,
            async_copies=count(r"LDGSTS\S*\.128"),
            narrow_copies=count(r"LDGSTS(?!\S*\.128)"),
            products=count(r"(?:HMMA|HGMMA|UTCHMMA|IMMA)"),
            wide_loads=count(r"LDG\S*\.128"),
        )


def _cuobjdump(option: str, path: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
