"""The models that come with Tandem and their bundled drafters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "models"
BUNDLED_MODEL = BUNDLED_FOLDER / "tandem-code-10m"

DRAFTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "tandem-code-10m": {
            "draft_model": "tandem-code-1m",
            "medusa": "tandem-code-10m-medusa",
            "eagle": "tandem-code-10m-eagle3",
        },
        "tandem-code-10m-hybrid": {"draft_model": "tandem-code-1m", "mtp": "tandem-code-10m-hybrid-mtp"},
    }
)
"""The drafter's folder by bundled model and method."""


def is_bundled_model(model: str) -> bool:
    return _folder(model) == BUNDLED_MODEL


def bundled_draft(target: str, method: str) -> str | None:
    """Return the folder of the bundled drafter of a bundled target for this method, or None."""
    folder = _folder(target)
    name = DRAFTS.get(folder.name, {}).get(method) if folder.parent == BUNDLED_FOLDER else None
    return None if name is None else str(BUNDLED_FOLDER / name)


def _folder(model: str) -> Path:
    return Path(os.path.expanduser(model)).resolve()


def bundled_path(model: str) -> str:
    """Return the folder of a bundled model given by its short name; return any other model unchanged."""
    folder = BUNDLED_FOLDER / model
    is_name = Path(model).name == model and not Path(model).is_dir()
    return str(folder) if is_name and (folder / "config.json").is_file() else model
