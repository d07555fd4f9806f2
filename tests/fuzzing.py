"""How listeners and decoders are fuzzed: some examples each time, and for FUZZ_SECONDS where that is set.

FUZZ_SECONDS=600 pytest --timeout 700 -k fuzz tests
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis
import psutil
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
GROWTH_BYTES = 64 * 2**20
"""What a long run may add to this process' memory after its first tenth."""

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
"""What JSON can say, and more."""


def fuzz(check: Callable[[Any], None], strategy: st.SearchStrategy[Any], examples: int) -> None:
    """`check` raises for an example that did harm. Each round has other examples, always the same ones."""
    process = psutil.Process()
    started = time.monotonic()
    rss: int | None = None
    for number in itertools.count():
        run = settings(
            max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )(given(strategy)(check))
        hypothesis.seed(number)(run)()
        spent = time.monotonic() - started
        if rss is None and spent > SECONDS / 10:
            rss = process.memory_info().rss
        if spent >= SECONDS:
            break
    if SECONDS:
        assert rss is not None and process.memory_info().rss - rss < GROWTH_BYTES
        print(f"\n{number + 1} rounds of {examples} examples in {spent:.0f} s")


@st.composite
def damaged(draw: st.DrawFn, whole: Sequence[bytes]) -> bytes:
    """One of these messages with some bytes changed, taken out or put in; cut off, or followed by more."""
    raw = bytearray(draw(st.sampled_from(list(whole))))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(raw)))
        raw[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    if draw(st.booleans()):
        del raw[draw(st.integers(0, len(raw))) :]
    return bytes(raw) + draw(st.sampled_from([b"", b"\0", b"\xff" * 9]))
