"""A run ends with one line that summarizes it in pytest's own style."""

from __future__ import annotations

from collections import Counter

from tests.tiers.closing import NO_REASON, closing_line, reasons_of


def test_the_line_has_counts_reasons_left_out_tests_and_the_time() -> None:
    skips = Counter({"needs an NVIDIA GPU": 3, "no cluster": 1})
    assert closing_line("fast", ["100 passed", "4 skipped"], skips, "9 CPU-s left out", 0, 83.25) == (
        "100 passed, 4 skipped (3 needs an NVIDIA GPU; 1 no cluster), 9 CPU-s left out, "
        "fast tier, seed 0 in 83.2s"
    )
    assert (
        closing_line("full", ["9 passed"], Counter(), "", 17, 2.0) == "9 passed, full tier, seed 17 in 2.0s"
    )


def test_skips_are_counted_by_reason() -> None:
    reports = [
        ("a.py", 1, "Skipped: no GPU"),
        ("b.py", 2, "no GPU"),
        "Skipped: no GPU",
        ("a.py", 1, "Skipped"),
    ]
    assert reasons_of(reports) == {"no GPU": 3, "": 1}
    assert "" in NO_REASON
