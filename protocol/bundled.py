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
