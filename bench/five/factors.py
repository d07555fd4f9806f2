"""The five techniques, as the options of `tandem serve` that turn each on and off."""

from __future__ import annotations

from collections.abc import Sequence

from bench.five.effects import Cell

FACTORS = ("disaggregation", "speculation", "paging", "sharing", "quantization")
TITLES = {
    "disaggregation": "disaggregation",
    "speculation": "speculation",
    "paging": "paged KV",
    "sharing": "prefix sharing",
    "quantization": "quantization",
}
WORKERS = 2
"""Workers of every cell: one prefill and one decode worker, or two that do both."""


def serve_options(cell: Cell, speculative_config: str) -> list[str]:
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


def parse_factors(text: str) -> list[str]:
    """Return the factors in the order of `FACTORS`. Raises ValueError that names the option, the value and
    the choices.
    """
    return chosen(text, FACTORS, "--factors")


def chosen(text: str, known: Sequence[str], flag: str) -> list[str]:
    """Return the comma-separated names in the order of `known`. Raises ValueError if a name is not in
    `known`.
    """
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"{flag}: {name!r} is none of {', '.join(known)}")
    return [name for name in known if name in names]
