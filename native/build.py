"""Compiles a kernel for this machine at first use, and loads it.

The library lies in a cache (TANDEM_CACHE_DIR, default ~/.cache/tandem) under a name made of the sources, the
compiler and the CPU, so a changed source or another machine on the same home directory gets its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fno-strict-aliasing",
    "-fPIC",
    "-shared",
]
_NATIVE = ["-march=native"]
_COMPILERS = ("g++", "c++", "clang++")
_TIMEOUT = 120.0  # seconds
_QUOTED_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class BuildError(RuntimeError):
    """The kernel cannot be built here; the message says why."""


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    if chosen:
        return shlex.split(chosen)
    for name in _COMPILERS:
        path = shutil.which(name)
        if path:
            return [path]
    raise BuildError(f"no C++ compiler: CXX is not set and none of {', '.join(_COMPILERS)} is in PATH")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _cpu() -> str:
    """What -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n", 1)[0].splitlines() if cpuinfo.exists() else []
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), platform.processor(), *(x for x in lines if x.startswith(wanted))])


def _cache_dir() -> Path:
    return Path(os.environ.get("TANDEM_CACHE_DIR") or Path.home() / ".cache" / "tandem")


def _with_headers(source: Path) -> list[Path]:
    """The source and all that it includes by a quoted name, one after the other."""
    found = [source]
    for file in found:
        headers = ((file.parent / name).resolve() for name in _QUOTED_INCLUDE.findall(file.read_text()))
        found += dict.fromkeys(header for header in headers if header.exists() and header not in found)
    return found


def build(source: Path) -> Path:
    """The library made of a source and the headers that it includes, compiled now unless the cache has it.

    Raises BuildError.
    """
    compiler = _compiler()
    identity = [
        _run([*compiler, "--version"]),
        *_FLAGS,
        *_NATIVE,
        _cpu(),
        *(file.read_text() for file in _with_headers(source)),
    ]
    key = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:20]
    library = _cache_dir() / f"{source.stem}-{key}.so"
    if library.exists():
        return library
    started = time.monotonic()
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
        os.close(handle)
    except OSError as error:
        raise BuildError(f"cache directory {library.parent}: {error}") from error
    try:
        _compile(compiler, source, unfinished)
        os.replace(unfinished, library)  # whoever else builds it now makes the same file
    except BuildError:
        os.unlink(unfinished)
        raise
    logger.info("built %s in %.1f s", library, time.monotonic() - started)
    return library


def _compile(compiler: list[str], source: Path, output: str) -> None:
    command = [*compiler, *_FLAGS, str(source), "-o", output]
    try:
        _run([*command, *_NATIVE])
    except BuildError as error:
        logger.info("compiling without %s: %s", shlex.join(_NATIVE), error)
        _run(command)


def load_library(source: Path, *, keep_gil: bool = False) -> ctypes.CDLL:
    """The library made of a source, loaded. Raises BuildError.

    `keep_gil` is for calls of microseconds: to take the lock back from a busy thread can cost milliseconds.
    """
    path = build(source)
    try:
        return ctypes.PyDLL(str(path)) if keep_gil else ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path}: {error}") from error
