"""Writes the files of a run whole: whatever interrupts it, a file is there as it was or as it shall be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from native.ownership import takes_lock
from protocol.errors import ConfigError, TandemError


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file. Raises `TandemError` if the disk is full, or the folder cannot be written."""
    make_folder(path.parent)
    partial = path.with_suffix(".partial")
    try:
        save_file(dict(tensors), partial, metadata=dict(metadata))
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        raise TandemError(f"{path} cannot be written: {error}") from error


def make_folder(folder: Path) -> None:
    """Make a folder and those above it. Raises `TandemError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TandemError(f"{folder} cannot be made: {error.strerror}") from error


@contextmanager
def only_run(folder: Path, flag: str) -> Iterator[None]:
    """Make the folder and keep every other run out of it. Raises `ConfigError` if another run is in it.

    The lock is the folder's own, so it leaves no file and ends with the process. A file system without locks
    lets every run in.
    """
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not takes_lock(descriptor):
            raise ConfigError(f"{flag}: another run writes to {folder}")
        yield
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8. Raises `TandemError`."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise TandemError(f"{path} cannot be written: {error.strerror}") from error


def write_json(path: Path, content: Mapping[str, object]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")
