"""Libraries' kernels that are faster than ours, and the rule that chooses between them and ours.

A library adds in orders of its own, which may depend on a step's other rows, so `--deterministic` takes none.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger("tandem.engine")

Capability = tuple[int, int]

_NEWEST = (12, 9)
_MOST_ERROR = 0.1
"""The most that a trial may differ, relative to its result. Inputs rounded to FP8 make 0.03; wrong ones 1."""


class Library(NamedTuple):
    """A kernel of a Python package, and the compute capabilities and dtypes of models that it takes."""

    name: str
    package: str
    first: Capability
    last: Capability
    dtypes: tuple[torch.dtype, ...]


FLASH = Library("FlashAttention-3", "flash_attn_interface", (9, 0), (9, 0), (torch.bfloat16, torch.float16))
MARLIN = Library("vLLM's Marlin", "vllm", (8, 0), _NEWEST, (torch.bfloat16, torch.float16))
FP8_ROWS = Library("torch._scaled_mm", "torch", (8, 9), _NEWEST, (torch.bfloat16,))
FP8_BLOCKS = FP8_ROWS._replace(first=(9, 0), last=(9, 0))


def library_fault(library: Library, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the library cannot serve a model of this dtype on the device; None if it can."""
    capability = capability_of(device)
    if capability is None:
        return f"{library.name} does not run on {device.type}"
    if not library.first <= capability <= library.last:
        return f"{library.name} does not run on compute capability {capability[0]}.{capability[1]}"
    if dtype not in library.dtypes:
        return f"{library.name} does not take {dtype}"
    if importlib.util.find_spec(library.package) is None:
        return f"{library.name} needs the package {library.package}"
    return None


def capability_of(device: torch.device) -> Capability | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def passes(library: Library, trial: Callable[[], tuple[Tensor, Tensor]]) -> bool:
    """Return whether the library computes what it should in `trial`, which returns both results. Its package
    may be another version, or be built without this kernel.
    """
    try:
        found, expected = (each.float() for each in trial())
        error = float((found - expected).norm() / expected.norm())
    except Exception as reason:  # whatever a foreign package raises
        logger.warning("%s is not used: %s: %s", library.name, type(reason).__name__, reason)
        return False
    if not error <= _MOST_ERROR:
        logger.warning("%s is not used: a trial differs by %.2g of its result", library.name, error)
        return False
    return True
