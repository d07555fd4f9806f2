"""Seeds of randomized tests: the same in each run of the fast tier, fresh ones in the full tier."""

from __future__ import annotations

import os
import random

VARIABLE = "TEST_SEED"
"""The environment variable with the run's seed, which started processes inherit."""
_FRESH = 10**6


def seed() -> int:
    return int(os.environ.get(VARIABLE, "0"))


def seeds(count: int) -> range:
    """Return `count` seeds that follow from the run's seed. Without one they begin with 0."""
    first = seed() * 1000
    return range(first, first + count)


def set_seed(chosen: int | None, fresh: bool) -> int:
    """Set this run's seed: the chosen one, else the environment's, else a fresh one if asked for, else 0."""
    if chosen is None:
        given = os.environ.get(VARIABLE)
        chosen = int(given) if given else random.SystemRandom().randrange(1, _FRESH) if fresh else 0
    os.environ[VARIABLE] = str(chosen)
    return chosen
