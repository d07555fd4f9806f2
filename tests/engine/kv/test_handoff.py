"""The blocks and tokens of a hand-off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.kv.sequence_blocks import HandoffLayout


@pytest.mark.parametrize(("state_blocks", "places"), [(None, 33), (3, (3 + 3) * 16)])
def test_a_state_takes_whole_blocks_after_those_of_the_tokens(state_blocks: int | None, places: int) -> None:
    pool: Any = SimpleNamespace(block_size=16, state_blocks=state_blocks)
    state: Any = None if state_blocks is None else SimpleNamespace()
    assert HandoffLayout(pool, [], state).num_places(33) == places
