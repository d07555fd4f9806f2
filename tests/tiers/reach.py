"""Measures how many imports lead from each test module to the changed files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from pathlib import Path

_QUOTED = re.compile(r"""["']([a-z_]\w*(?:\.[a-z_]\w*)+)""")
"""A quoted module name that another process imports, as in "worker.loop:Loop"."""
_STARTED = re.compile(r"""["']-m["'], ["']([a-z_][\w.]*)["']""")
_EVERYWHERE = "tests/conftest.py"
"""Every test imports it, so it does not count."""


class Imports:
    """The modules that each module of product and tests uses, by importing, starting or naming them."""

    def __init__(self, root: Path) -> None:
        import grimp  # a host for GPU tests may lack it

        tools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
        packages = tools["importlinter"]["root_packages"]
        graph = grimp.build_graph(*packages, "tests", exclude_type_checking_imports=True, cache_dir=None)
        files = {module: _file_of(root, module) for module in graph.modules}
        self._modules = {file: module for module, file in files.items() if file}
        self._users: dict[str, set[str]] = {}
        for file, module in self._modules.items():
            text = (root / file).read_text()
            named = {*_QUOTED.findall(text), *(f"{each}.__main__" for each in _STARTED.findall(text))}
            used = graph.find_modules_directly_imported_by(module) | (named & graph.modules)
            for each in used | self._fixtures_of(file):
                if each != module:
                    self._users.setdefault(each, set()).add(module)

    def distances(self, changed: Collection[str]) -> dict[str, int]:
        """Return by file how many imports lead from a test module to the nearest changed file."""
        reached = self._changed(changed)
        found = dict.fromkeys(reached, 0)
        for distance in range(1, len(self._modules)):
            reached = {user for module in reached for user in self._users.get(module, ())} - found.keys()
            found |= dict.fromkeys(reached, distance)
        tests = {file: module for file, module in self._modules.items() if "/test_" in file}
        return {file: found[module] for file, module in tests.items() if module in found}

    def _fixtures_of(self, file: str) -> set[str]:
        """Return the conftest modules that pytest imports for this file."""
        if not file.startswith("tests/"):
            return set()
        files = {str(folder / "conftest.py") for folder in Path(file).parents} - {_EVERYWHERE}
        return {self._modules[each] for each in files & self._modules.keys()}

    def _changed(self, files: Collection[str]) -> set[str]:
        """Return the changed modules.

        A file in another language stands for the modules in its folder, or in the nearest folder above that
        has any.
        """
        found = {self._modules[file] for file in files if file in self._modules}
        for file in files:
            if not file.endswith(".py"):
                near = (self._in_folder(folder) for folder in Path(file).parents[:-1])
                found |= next(filter(None, near), set())
        return found - {self._modules[_EVERYWHERE]}

    def _in_folder(self, folder: Path) -> set[str]:
        return {module for file, module in self._modules.items() if Path(file).parent == folder}


def _file_of(root: Path, module: str) -> str | None:
    path = module.replace(".", "/")
    return next((each for each in (f"{path}.py", f"{path}/__init__.py") if (root / each).exists()), None)
