"""A run ends with one line that summarizes it in pytest's own style."""

from __future__ import annotations

from collections import Counter

from tests.tiers.closing import NO_REASON, LeftOut, closing_line, reasons_of


def test_the_line_has_counts_reasons_left_out_tests_and_the_time() -> None:
    skips = Counter({"needs an NVIDIA GPU": 3, "no cluster": 1})
    left_out = LeftOut(12, 345.6, 2.2, "abc1234")
    assert closing_line("fast", ["100 passed", "4 skipped"], skips, left_out, 0, 83.25) == (
        "100 passed, 4 skipped (3 needs an NVIDIA GPU; 1 no cluster), "
        "346 CPU-s left out in 12 modules, 2 of them reached by changes since abc1234, "
        "fast tier, seed 0 in 83.2s"
    )


def test_the_line_omits_empty_parts() -> None:
    assert closing_line("full", ["1 failed", "9 passed"], Counter(), None, 17, 2.0) == (
        "1 failed, 9 passed, full tier, seed 17 in 2.0s"
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
