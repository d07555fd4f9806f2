"""Import hooks that make Transformers' model classes light to import. Without hooks they import PyTorch's
compiler, its distributed tensors, and SciPy, and read the source of all models twice.

The hooks report SciPy and distributed tensors as missing: Transformers needs them only for object detection
and sharded training. The compiler, `torch._dynamo`, is loaded when something uses it; most models never do.
The names that the models' modules define are cached in a file for the installed release.
Call `install` before the first import of Transformers.

Models are first made of tensors without memory. PyTorch has kernels for these in C++, and further ones in
Python, which import SymPy and take 54 MB. A process that calls `delay_kernels` loads the latter when a model
needs them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from native.ownership import cache_dir, own_folder, read_own

_CHECKS = "transformers.utils.import_utils"
_ABSENT = ("is_scipy_available", "is_torch_distributed_available")
_NAMES = "define_import_structure"
_COMPILER = "torch._dynamo"
_KERNELS = "torch._meta_registrations"
_FOR_GENERATORS = "torch._prims.rng_prims"
"""The only one of the modules that `_KERNELS` imports and that others need."""
_FOR_MASKS = f"{_COMPILER}._trace_wrapped_higher_order_op"
"""The only part of the compiler that Transformers imports. This part needs no other part."""


def install() -> None:
    """Change later imports in this process. Nothing is imported now."""
    sys.meta_path.insert(0, _Finder())


def delay_kernels() -> None:
    """Let a later import of PyTorch leave kernels for tensors without memory to `load_kernels`."""
    _loaders[_KERNELS] = _KernelsLoader


def load_kernels() -> bool:
    """Load the delayed kernels, if any. Return whether it has done so."""
    kernels = sys.modules.get(_KERNELS)
    if not isinstance(kernels, _LateModule):
        return False
    kernels.become_real()
    return True


Made = TypeVar("Made")
Parameters = ParamSpec("Parameters")


def with_kernels(make: Callable[Parameters, Made]) -> Callable[Parameters, Made]:
    """Wrap a function that makes a model: it is called again if it needs a delayed kernel."""

    @functools.wraps(make)
    def made(*args: Parameters.args, **options: Parameters.kwargs) -> Made:
        try:
            return make(*args, **options)
        except NotImplementedError:
            if not load_kernels():
                raise
            return make(*args, **options)

    return made


class _Finder(MetaPathFinder):
    """A finder of the modules that load differently; it leaves all other modules to later finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        loads = _loaders.get(name)
        spec = PathFinder.find_spec(name, path) if loads is not None else None
        if loads is not None and spec is not None and spec.loader is not None:
            spec.loader = loads(spec.loader)
        return spec


class _OwnLoader(Loader):
    """A loader that wraps a module's plain loader."""

    def __init__(self, plain: Loader) -> None:
        self.plain = plain


class _ChecksLoader(_OwnLoader):
    """The loader of Transformers' checks for libraries. It makes the checks in `_ABSENT` return False, and
    caches the result of `define_import_structure`, a function of the same module.
    """

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.plain.exec_module(module)
        for name in _ABSENT:
            if hasattr(module, name):
                setattr(module, name, lambda: False)
        if hasattr(module, _NAMES):
            setattr(module, _NAMES, _kept(getattr(module, _NAMES)))


Structure = dict[frozenset[str], dict[str, set[str]]]
"""Names that modules define, by the libraries that they need, then by module."""


def _kept(define: Callable[..., Structure]) -> Callable[..., Structure]:
    """Wrap Transformers' `define_import_structure`: its result for the folder of all models is cached."""

    def kept(path: str | Path, prefix: str | None = None) -> Structure:
        folder = Path(path) if os.path.isdir(path) else Path(path).parent
        if folder.name != "models":
            return define(path, prefix)
        start = "" if prefix is None else f"{prefix}."
        return {
            frozenset(needs): {start + module: set(names) for module, names in modules.items()}
            for needs, modules in _names_in(folder, define)
        }

    return kept


@functools.cache
def _names_in(folder: Path, define: Callable[..., Structure]) -> list[tuple[list[str], dict[str, list[str]]]]:
    stamps = sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(folder) if entry.is_dir())
    key = hashlib.sha256(f"{folder} {stamps}".encode()).hexdigest()[:20]
    file = cache_dir() / f"transformers-{key}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(read_own(file))
    found = [
        (sorted(needs), {module: sorted(names) for module, names in modules.items()})
        for needs, modules in define(str(folder)).items()
    ]
    with contextlib.suppress(OSError):
        made = own_folder(file.parent) / f"{file.name}.{os.getpid()}"
        made.write_text(json.dumps(found))
        made.replace(file)
    return found


class _KernelsLoader(_OwnLoader):
    """The loader of the kernels in Python. It makes a module that loads itself when it is first used."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _LateModule(spec.name)
        module.__dict__["_waiting"] = self.plain
        return module

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(ImportError):  # other releases need no module for generators
            importlib.import_module(_FOR_GENERATORS)


class _LateModule(ModuleType):
    """A stand-in for a module. It becomes the real one when an attribute is used that it lacks."""

    _late = ""
    """An attribute of Python's own whose use counts, too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != self._late:
            raise AttributeError(name)
        self.become_real()
        return getattr(self, name)

    def become_real(self) -> None:
        loader = self.__dict__.pop("_waiting")
        assert self.__spec__ is not None
        self.__spec__.loader = loader
        self.__class__ = ModuleType  # type: ignore[assignment]
        loader.exec_module(self)


class _CompilerLoader(_OwnLoader):
    """The loader of the compiler. It makes a module that loads itself when it is first used."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _LateCompiler(spec.name)
        module.__dict__["_waiting"] = self.plain
        module.__dict__["_noted"] = []
        module.__path__ = spec.submodule_search_locations or []
        return module

    def exec_module(self, module: ModuleType) -> None:
        importlib.import_module(_FOR_MASKS)
        del module.__path__  # so that the import of any other part loads the whole


class _LateCompiler(_LateModule):
    """A stand-in for `torch._dynamo`. It becomes the real module when anything but its decorators is used."""

    _late = "__path__"
    _noted: list[tuple[str, Any]]

    def allow_in_graph(self, function: Any) -> Any:
        return self._note("allow_in_graph", function)

    def assume_constant_result(self, function: Any) -> Any:
        return self._note("assume_constant_result", function)

    def disable(self, function: Any = None, recursive: bool = True, **options: Any) -> Any:
        if function is None:
            return functools.partial(self.disable, recursive=recursive, **options)

        @functools.wraps(function)
        def disabled(*args: Any, **named: Any) -> Any:
            if isinstance(self, _LateCompiler):  # nothing is being compiled yet
                return function(*args, **named)
            return self.disable(function, recursive, **options)(*args, **named)

        return disabled

    def _note(self, decorator: str, function: Any) -> Any:
        self._noted.append((decorator, function))
        return function

    def become_real(self) -> None:
        load_kernels()
        assert self.__spec__ is not None
        self.__path__ = self.__spec__.submodule_search_locations or []
        noted = self.__dict__.pop("_noted")
        super().become_real()
        for decorator, function in noted:
            getattr(self, decorator)(function)


_loaders: dict[str, type[_OwnLoader]] = {_CHECKS: _ChecksLoader, _COMPILER: _CompilerLoader}
"""The modules that load differently."""
