"""Makes separate environments for client programs, kept in Tandem's cache, since their packages would change
the tests' own.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from native.ownership import cache_dir, own_folder

INSTALL_S = 300


def python_with(packages: Sequence[str]) -> Path:
    """Return a Python that has these packages: the tests' own if the list is empty. Skips the test if uv or
    the packages cannot be had.
    """
    if not packages:
        return Path(sys.executable)
    uv = pytest.importorskip("uv").find_uv_bin()
    folder = _folder(packages, f"python{sys.version_info.minor}")
    python = folder / "bin" / "python"
    _make(
        folder,
        [uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), *packages],
    )
    return python


def node_with(packages: Sequence[str]) -> Path:
    """Return a folder whose scripts Node.js runs with these packages. Skips the test like `python_with`."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Node.js is not installed")
    folder = _folder(packages, "node")
    _make(folder, [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages])
    return folder


def _folder(packages: Sequence[str], kind: str) -> Path:
    digest = hashlib.blake2b(" ".join(packages).encode(), digest_size=8).hexdigest()
    return own_folder(cache_dir() / "clients") / f"{kind}-{digest}"


def _make(folder: Path, *commands: Sequence[str]) -> None:
    """Run the commands that make a folder, once for all processes."""
    done = folder / "complete"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        for command in commands:
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
            except (subprocess.SubprocessError, OSError) as error:
                said = getattr(error, "stderr", None) or str(error)
                pytest.skip(f"not installed: {str(said).strip().splitlines()[-1]}")
        done.touch()
