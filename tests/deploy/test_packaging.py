"""What an installed package needs beside its Python files."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_native_sources_and_pages_are_part_of_the_packages() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    packaged = {
        path
        for package, patterns in packages["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package).glob(pattern)
    }
    tops = {name.rstrip("*") for name in packages["packages"]["find"]["include"]}
    sources = {path for top in tops for path in (ROOT / top).rglob("*") if path.suffix in (".cpp", ".h")}
    assert len(sources) > 10
    pages = set((ROOT / "router" / "api" / "pages").iterdir())
    assert len(pages) > 10
    assert sources | pages <= packaged
