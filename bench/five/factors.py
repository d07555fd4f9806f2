"""The five techniques, as the options of `tandem serve` that turn each on and off."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

TechniqueSet = frozenset[str]
"""The techniques that are on in a cell."""


FACTORS = ("disaggregation", "speculation", "paging", "sharing", "quantization")
TITLES = {"paging": "paged KV", "sharing": "prefix sharing"}
WORKERS = 2
"""Number of workers of every cell: a prefill and a decode worker, or two that do both."""


def serve_options(cell: TechniqueSet, speculative_config: str) -> list[str]:
    """Return the options of a server with the cell's techniques on and all others off."""
    pair = ["--prefill-replicas", "1", "--decode-replicas", "1"]
    both = ["--no-disaggregation", "--decode-replicas", str(WORKERS)]
    options = pair if "disaggregation" in cell else both
    if "speculation" in cell:
        options += ["--speculative-config", speculative_config]
    if "paging" not in cell:
        options += ["--no-paged-kv"]
    if "sharing" not in cell:
        options += ["--no-enable-prefix-caching"]
    if "quantization" in cell:
        options += ["--quantization", "int4", "--kv-cache-dtype", "int8"]
    return options


def cells_of(factors: Sequence[str]) -> list[TechniqueSet]:
    """Return all 2^k cells, from all factors off to all on."""
    return [frozenset(chosen) for size in range(len(factors) + 1) for chosen in combinations(factors, size)]


def name_of(cell: TechniqueSet) -> str:
    return "+".join(sorted(cell)) or "none"
