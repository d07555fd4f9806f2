"""Compilation of a kernel for this machine at first use, and its loading.

The library is cached (TANDEM_CACHE_DIR, default ~/.cache/tandem) under a name derived from the sources, the
compiler and the CPU, so a changed source or another machine with the same home directory gets its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from native.ownership import CACHE_VARIABLE, cache_dir, check_own, locked, own_folder
from native.structs import prototypes

logger = logging.getLogger("tandem.native")

T = TypeVar("T")

_MATH = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
_FLAGS = ["-std=c++17", "-O3", *_MATH, "-fno-strict-aliasing", "-fPIC", "-shared"]
_NATIVE = ["-march=native"]
_COMPILERS = ("g++", "c++", "clang++")
_TIMEOUT = 120.0  # seconds
_QUOTED_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class BuildError(RuntimeError):
    """A failed build of a kernel; the message says why."""


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


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"])


@functools.cache
def _cpu() -> str:
    """Return a description of the CPU, which decides the effect of -march=native."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n", 1)[0].splitlines() if cpuinfo.exists() else []
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), platform.processor(), *(x for x in lines if x.startswith(wanted))])


def own_inductor_cache() -> None:
    """Keep torch.compile's output in our cache: any user may make Inductor's default folder in /tmp.

    Inductor loads libraries and pickles from there. Raises OSError.
    """
    configured = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _inductors_default())
    folder = cache_dir() / "inductor" if configured == _inductors_default() else configured
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own_folder(folder))


def _inductors_default() -> Path:
    """Return Inductor's default folder; torch writes it to the environment when it is imported."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return Path(default_cache_dir())


def _with_headers(source: Path) -> list[Path]:
    """Return the source and, recursively, every file that it includes by a quoted name."""
    found = [source]
    for file in found:
        headers = ((file.parent / name).resolve() for name in _QUOTED_INCLUDE.findall(file.read_text()))
        found += dict.fromkeys(header for header in headers if header.exists() and header not in found)
    return found


def build(source: Path) -> Path:
    """Return the library of a source and its headers; compile it if it is not cached. Raises BuildError."""
    return _build([source])[0]


def build_all(folders: Iterable[Path]) -> None:
    """Compile the kernels in these folders that the cache lacks, several at once.

    A kernel that cannot be built raises when it is loaded, not here.
    """
    sources = sorted(source for folder in folders for source in folder.rglob("*.cpp"))
    with contextlib.suppress(BuildError):
        _build(sources)


def _build(sources: Sequence[Path]) -> list[Path]:
    compiler, folder = _compiler(), cache_dir()
    version = _version(tuple(compiler))
    libraries = [folder / _library_name(source, version) for source in sources]
    try:
        own_folder(folder)
        if not all(library.exists() for library in libraries):
            with locked(folder / "lock"):
                pairs = zip(sources, libraries, strict=True)
                _compile_all(compiler, [pair for pair in pairs if not pair[1].exists()])
        for library in libraries:
            check_own(library)
    except OSError as error:
        raise BuildError(f"cache directory {folder} ({CACHE_VARIABLE}): {error}") from error
    return libraries


def _library_name(source: Path, version: str) -> str:
    contents = (file.read_text() for file in _with_headers(source))
    identity = "\0".join([version, *_FLAGS, *_NATIVE, _cpu(), *contents])
    return f"{source.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"


def _compile_all(compiler: list[str], missing: Sequence[tuple[Path, Path]]) -> None:
    if not missing:
        return
    started = time.monotonic()
    names = ", ".join(source.stem for source, _ in missing)
    logger.info("compiling kernels for this CPU, which happens once: %s", names)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: _compile(compiler, *pair), missing))
    logger.debug("compiled in %.1f s", time.monotonic() - started)


def _compile(compiler: list[str], source: Path, library: Path) -> None:
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=library.parent)
    os.close(handle)
    command = [*compiler, *_FLAGS, str(source), "-o", unfinished]
    try:
        try:
            _run([*command, *_NATIVE])
        except BuildError as error:  # some compilers refuse the flag, such as Apple's older ones on ARM
            logger.info("compiling without %s: %s", shlex.join(_NATIVE), error)
            _run(command)
        os.replace(unfinished, library)
    except BuildError:
        os.unlink(unfinished)
        raise


def load_library(source: Path, *, keep_gil: bool = False) -> ctypes.CDLL:
    """Load the library built from `source`, whose functions have the types that the source gives them.
    Raises BuildError.

    `keep_gil` is for calls that take microseconds: getting the GIL back from a busy thread can take
    milliseconds.
    """
    path = build(source)
    try:
        library = ctypes.PyDLL(str(path)) if keep_gil else ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path}: {error}") from error
    for name, result, arguments in chain.from_iterable(map(prototypes, _with_headers(source))):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def optional(log: logging.Logger, fallback: str) -> Callable[[Callable[[], T]], Callable[[], T | None]]:
    """Decorate a function that loads a library, so that it runs once. If the library cannot be built, log the
    `fallback` with the reason, and return None.
    """

    def decorate(load: Callable[[], T]) -> Callable[[], T | None]:
        @functools.cache
        @functools.wraps(load)
        def loaded() -> T | None:
            try:
                return load()
            except BuildError as error:
                log.warning("%s: %s", fallback, error)
                return None

        return loaded

    return decorate


def address_of(function: Any) -> int:
    """Return the address of a library's function, for native callers."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0
