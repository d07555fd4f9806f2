"""Import hooks that halve the time and memory of importing Transformers' model classes, which import
PyTorch's compiler, its distributed tensors and SciPy.

The hooks report SciPy and distributed tensors as missing: Transformers needs them only for object detection
and sharded training. The compiler, `torch._dynamo`, is loaded when something uses it; most models never do.
Call `install` before the first import of Transformers.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_CHECKS = "transformers.utils.import_utils"
_ABSENT = ("is_scipy_available", "is_torch_distributed_available")
_COMPILER = "torch._dynamo"
_FOR_MASKS = f"{_COMPILER}._trace_wrapped_higher_order_op"
"""The only part of the compiler that Transformers imports. This part needs no other part."""


def install() -> None:
    """Change later imports in this process. Nothing is imported now."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """A finder of the two modules that load differently; it leaves all other modules to later finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        loads = {_CHECKS: _ChecksLoader, _COMPILER: _CompilerLoader}.get(name)
        spec = PathFinder.find_spec(name, path) if loads is not None else None
        if loads is not None and spec is not None and spec.loader is not None:
            spec.loader = loads(spec.loader)
        return spec


class _OwnLoader(Loader):
    """A loader that wraps a module's plain loader."""

    def __init__(self, plain: Loader) -> None:
        self.plain = plain


class _ChecksLoader(_OwnLoader):
    """The loader of Transformers' checks for libraries. It makes the checks in `_ABSENT` return False."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.plain.exec_module(module)
        for name in _ABSENT:
            if hasattr(module, name):
                setattr(module, name, lambda: False)


class _CompilerLoader(_OwnLoader):
    """The loader of the compiler. It makes a module that loads itself when it is first used."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _LateCompiler(spec.name)
        module.__dict__["_waiting"] = (self.plain, [])
        module.__path__ = spec.submodule_search_locations or []
        return module

    def exec_module(self, module: ModuleType) -> None:
        importlib.import_module(_FOR_MASKS)
        del module.__path__  # so that the import of any other part loads the whole


class _LateCompiler(ModuleType):
    """A stand-in for `torch._dynamo`. It becomes the real module when anything but its decorators is used."""

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
        self.__dict__["_waiting"][1].append((decorator, function))
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        loader, noted = self.__dict__.pop("_waiting")
        assert self.__spec__ is not None
        self.__path__ = self.__spec__.submodule_search_locations or []
        self.__spec__.loader = loader
        self.__class__ = ModuleType  # type: ignore[assignment]
        loader.exec_module(self)
        for decorator, function in noted:
            getattr(self, decorator)(function)
        return getattr(self, name)
