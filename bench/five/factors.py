"""The five techniques, as options of `tandem serve` and fields of a request that turn each on and off."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

TechniqueSet = frozenset[str]
"""The techniques that are on in a cell."""


FACTORS = ("disaggregation", "speculation", "paging", "sharing", "quantization")
TITLES = {"paging": "paged KV", "sharing": "prefix sharing"}
REQUESTED = frozenset({"speculation", "sharing"})
"""The techniques that each request turns on or off, so that their cells are measured on one server."""
WORKERS = 2
"""Number of workers of every cell: a prefill and a decode worker, or two that do both."""


def served(cell: TechniqueSet) -> TechniqueSet:
    """Return the techniques that the cell's server needs a start of its own for."""
    return cell - REQUESTED


def serve_options(cell: TechniqueSet, speculative_config: str) -> list[str]:
    """Return the options of the cell's server. It speculates and shares prefixes if a request asks for it."""
    pair = ["--prefill-replicas", "1", "--decode-replicas", "1"]
    both = ["--no-disaggregation", "--decode-replicas", str(WORKERS)]
    options = pair if "disaggregation" in cell else both
    options = [*options, "--speculative-config", speculative_config]
    if "paging" not in cell:
        options += ["--no-paged-kv"]
    if "quantization" in cell:
        options += ["--quantization", "int4", "--kv-cache-dtype", "int8"]
    return options


def request_fields(cell: TechniqueSet) -> dict[str, Any]:
    """Return the fields of the cell's requests, apart from the salts that keep them from sharing prefixes."""
    return {} if "speculation" in cell else {"speculative": {"enabled": False}}


def cells_of(factors: Sequence[str]) -> list[TechniqueSet]:
    """Return all 2^k cells, from all factors off to all on."""
    return [frozenset(chosen) for size in range(len(factors) + 1) for chosen in combinations(factors, size)]


def name_of(cell: TechniqueSet) -> str:
    return "+".join(sorted(cell)) or "none"
