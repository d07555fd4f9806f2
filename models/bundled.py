"""The models that come with Tandem, and what drafts for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "models"
BUNDLED_MODEL = BUNDLED_FOLDER / "tandem-code-10m"

DRAFTS: Mapping[str, str] = MappingProxyType(
    {
        "draft_model": "tandem-code-1m",
        "medusa": "tandem-code-10m-medusa",
        "eagle": "tandem-code-10m-eagle3",
    }
)
"""By method, what drafts for the bundled model."""


def is_bundled_model(model: str) -> bool:
    return Path(os.path.expanduser(model)).resolve() == BUNDLED_MODEL


def bundled_path(model: str) -> str:
    """The folder of a bundled model that is given by its short name; any other model as it is."""
    folder = BUNDLED_FOLDER / model
    is_name = Path(model).name == model and not Path(model).is_dir()
    return str(folder) if is_name and (folder / "config.json").is_file() else model
