"""How long prompts are beside what comes of them."""

from __future__ import annotations

import pytest

from speculation.control.lengths import Lengths


def test_the_latest_requests_count() -> None:
    lengths = Lengths()
    assert 1 < lengths.read_per_written < 4
    for num_read, num_written in ((2000, 20), (10, 1000)):
        for _ in range(200):
            lengths.observe(num_read, num_written)
        assert lengths.read_per_written == pytest.approx(num_read / num_written, rel=0.02)


def test_long_requests_count_for_more_than_short_ones() -> None:
    lengths = Lengths()
    for _ in range(200):
        lengths.observe(1000, 2000)
        lengths.observe(10, 1)
    assert lengths.read_per_written == pytest.approx(0.5, rel=0.1)
