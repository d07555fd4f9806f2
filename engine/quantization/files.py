"""The tensors in a checkpoint's safetensors files, as they are stored."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from protocol.errors import ConfigError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_tensors(model: str, revision: str | None) -> dict[str, Tensor]:
    """By name, of a folder or a hub id: one file, or those that an index lists. They lie in the files' pages.

    Raises ConfigError if there is no such file, or if one cannot be read.
    """
    tensors = {}
    for path in _paths(model, revision):
        try:
            with safe_open(path, "pt") as file:
                tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise ConfigError(f"--model: cannot read {path}: {error}") from error
    return tensors


def _paths(model: str, revision: str | None) -> list[Path]:
    index = _find(model, _INDEX, revision)
    if index is None:
        single = _find(model, _SINGLE, revision)
        if single is None:
            raise ConfigError(f"--model: {model!r} has neither {_SINGLE} nor {_INDEX}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"--model: cannot read {index}: {error!r}") from error
    paths = [_find(model, name, revision) for name in names]
    if None in paths:
        raise ConfigError(f"--model: {model!r} lacks {names[paths.index(None)]}, which {_INDEX} lists")
    return [path for path in paths if path is not None]


def _find(model: str, name: str, revision: str | None) -> Path | None:
    found = cached_file(
        model,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
    )
    return None if found is None else Path(found)
