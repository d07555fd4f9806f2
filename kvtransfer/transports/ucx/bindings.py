"""NIXL's compiled bindings, found without importing the Python package around them.

When that package is imported it configures logging for the whole process and closes all existing handlers;
nothing in it is needed here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from kvtransfer.interface import TransferError

_PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
"""NIXL is built for each CUDA release; the package `nixl` only selects one of these."""


@functools.cache
def bindings() -> Any:
    """Return NIXL's module. Raises TransferError, which says what to install, if none can be loaded."""
    reasons = []
    for package in _PACKAGES:
        try:
            module = _load(package)
        except (ImportError, OSError) as error:
            reasons.append(f"{package}: {error}")
            continue
        if module is not None:
            return module
    why = "; ".join(reasons) or f"none of {', '.join(_PACKAGES)} is installed"
    raise TransferError(
        f"the ucx transport needs NIXL 1.5 or later ({why}); "
        "install it with `pip install --no-deps nixl nixl-cu12`, or nixl-cu13 with CUDA 13"
    )


def _load(package: str) -> ModuleType | None:
    """Return the package's bindings, or None if it is not installed."""
    name = f"{package}._bindings"
    if name in sys.modules:
        return sys.modules[name]
    parent = importlib.util.find_spec(package)
    if parent is None or parent.submodule_search_locations is None:
        return None
    spec = PathFinder.find_spec(name, parent.submodule_search_locations)
    if spec is None or spec.loader is None:
        raise ImportError("it has no bindings for this Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a later import of the package must find this module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def preload_nixl() -> None:
    """Load NIXL's libraries, if they are installed, in a process that forks the ones that use them."""
    with contextlib.suppress(TransferError):
        package = Path(bindings().__file__).parent
        for plugin in package.parent.glob(f"{package.name}.libs/**/libplugin_UCX.so"):
            with contextlib.suppress(OSError):  # NIXL reports it
                ctypes.CDLL(str(plugin))
