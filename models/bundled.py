"""The models that come with Tandem, and what drafts for them."""

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
        "tandem-code-10m-hybrid": {"draft_model": "tandem-code-1m"},
    }
)
"""By bundled model and method, what drafts for it."""


def is_bundled_model(model: str) -> bool:
    return _folder(model) == BUNDLED_MODEL


def bundled_draft(target: str, method: str) -> str | None:
    """The folder of what drafts for a bundled target by this method; None where nothing bundled does."""
    folder = _folder(target)
    name = DRAFTS.get(folder.name, {}).get(method) if folder.parent == BUNDLED_FOLDER else None
    return None if name is None else str(BUNDLED_FOLDER / name)


def _folder(model: str) -> Path:
    return Path(os.path.expanduser(model)).resolve()


def bundled_path(model: str) -> str:
    """The folder of a bundled model that is given by its short name; any other model as it is."""
    folder = BUNDLED_FOLDER / model
    is_name = Path(model).name == model and not Path(model).is_dir()
    return str(folder) if is_name and (folder / "config.json").is_file() else model
