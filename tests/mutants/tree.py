"""A private copy of the working tree whose files are changed, so that the checkout stays as it is."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LEFT = shutil.ignore_patterns(".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis")


@contextmanager
def private_copy(root: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, symlinks=True, ignore=_LEFT)
        (copy / ".venv").symlink_to((root / ".venv").resolve())
        yield copy


def environment(copy: Path) -> dict[str, str]:
    """Return the environment for processes that import the copy. They run one thread, since a fork keeps only
    one.
    """
    return {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}


@contextmanager
def changed(file: Path, text: bytes, age: int) -> Iterator[None]:
    """Change a file for the block's time. Its own modification time makes Python compile it again."""
    before, times = file.read_bytes(), file.stat()
    file.write_bytes(text)
    os.utime(file, (age, age))
    try:
        yield
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
