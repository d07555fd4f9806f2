"""`test_interpreted_kernels.py` runs the modules of this folder in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.devices.cuda.attention import tiles
from engine.devices.cuda.attention.tiles import Tile
from engine.devices.cuda.recurrent import operators
from tests.engine.interpreted.recorder import pageable_memory


@pytest.fixture(autouse=True)
def small_tiles() -> Iterator[None]:
    """Use small tiles, so that small steps have several of everything, and memory that needs no GPU."""
    with pytest.MonkeyPatch.context() as patch, pageable_memory():
        patch.setattr(tiles, "tile_of", lambda chunk, *_: Tile(32 if chunk else 16, 16, 4, 1))
        patch.setattr(tiles, "SPLIT", 32)
        patch.setattr(operators, "_VALUES", 16)
        yield
