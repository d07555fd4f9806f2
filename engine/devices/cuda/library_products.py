"""Libraries' kernels that are faster than ours, the rule that chooses between them and ours, and quantized
linear layers that they multiply on a CUDA device.

A library adds in orders of its own, which may depend on a step's other rows, so `--deterministic` takes none.
"""

from __future__ import annotations

import importlib.util
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from engine.linear.quantized import round_to_nearest
from engine.quantization.weight import CodeFormat, QuantizedWeight

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


_TRIAL_ROWS, _TRIAL_OUTPUTS, _TRIAL_INPUTS = 5, 128, 512


@dataclass(frozen=True, eq=False)
class LibraryProduct(ABC):
    """A weight in a library's layout, with scales [groups, outputs]."""

    inputs: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None

    library: ClassVar[Library]
    output_dims: ClassVar[dict[str, int]] = {"codes": 1, "scales": 1, "zeros": 1, "bias": 0}
    """The dimension of each tensor that outputs are in."""

    @classmethod
    @abstractmethod
    def library_of(cls, weight: QuantizedWeight) -> Library | None:
        """Return the library that multiplies by weights of this kind; None if there is none."""

    @classmethod
    @abstractmethod
    def of(cls, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Self:
        """Pack a weight for a model of this dtype."""

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor:
        """Multiply rows [rows, inputs]; return new rows [rows, outputs]."""

    @property
    def outputs(self) -> int:
        return self.scales.shape[1]

    def is_like(self, other: LibraryProduct) -> bool:
        """Return whether both can be joined into one product of the same inputs."""
        return self._kind == other._kind

    @property
    def _kind(self) -> tuple[object, ...]:
        return type(self), self.inputs, len(self.scales), self.zeros is None, self.bias is None

    @classmethod
    def joined(cls, products: Sequence[LibraryProduct]) -> Self:
        parts: dict[str, Any] = {}
        for name, dim in cls.output_dims.items():
            own = [getattr(each, name) for each in products]
            parts[name] = None if own[0] is None else torch.cat(own, dim)
        return cls(products[0].inputs, **parts)


class LibraryLinear(nn.Module):
    """A linear layer whose outputs are some of a product's, from `begin` on."""

    def __init__(self, product: LibraryProduct) -> None:
        super().__init__()
        self.product, self.begin = product, 0
        self.in_features, self.out_features = product.inputs, product.outputs

    @property
    def weight(self) -> Tensor:
        return self.product.codes

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x` [..., inputs]; return [..., outputs]."""
        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        made = self.product(rows)[:, self.begin : self.begin + self.out_features]
        return made.reshape(*x.shape[:-1], self.out_features)


def join_library(linears: Sequence[LibraryLinear]) -> LibraryLinear | None:
    """Join layers of one input into one product, of which they become parts; None if they are not alike.
    Joining the same layers again returns the same product.
    """
    if len(linears) == 1:
        return linears[0]
    products, first = [each.product for each in linears], linears[0].product
    *begins, end = accumulate((each.out_features for each in linears), initial=0)
    if all(each is first for each in products):
        are_all = [each.begin for each in linears] == begins and end == first.outputs
        return LibraryLinear(first) if are_all else None
    are_whole = end == sum(each.outputs for each in products)
    if not (are_whole and all(each.is_like(first) for each in products)):
        return None
    whole = first.joined(products)
    for each, begin in zip(linears, begins, strict=True):
        each.product, each.begin = whole, begin
    return LibraryLinear(whole)


def by_library(
    kinds: Sequence[type[LibraryProduct]], weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> LibraryLinear | None:
    """Return a layer that the first fitting library multiplies; None without one that passes its trial."""
    for kind in kinds:
        library, device = kind.library_of(weight), weight.codes.device
        if library is None or library_fault(library, device, dtype) is not None:
            continue
        group = weight.group_size if weight.scales.shape[1] > 1 else 0
        if _passes(kind.of, library, device, dtype, weight.format, group, weight.zeros is not None):
            return LibraryLinear(kind.of(weight, bias, dtype))
    return None


@cache
def _passes(
    pack: Callable[[QuantizedWeight, Tensor | None, torch.dtype], LibraryProduct],
    library: Library,
    device: torch.device,
    dtype: torch.dtype,
    format: CodeFormat,
    group: int,
    has_zeros: bool,
) -> bool:
    """Try the library with a small weight; `group` is 0 for one scale an output."""

    def trial() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(_TRIAL_ROWS, _TRIAL_INPUTS, generator=generator).to(device, dtype)
        bias = torch.randn(_TRIAL_OUTPUTS, generator=generator).to(device, dtype)
        plain = torch.randn(_TRIAL_OUTPUTS, _TRIAL_INPUTS, generator=generator).to(device)
        weight = round_to_nearest(plain, format, group or _TRIAL_INPUTS)
        if has_zeros:
            zeros = torch.randint(16, weight.scales.shape, generator=generator)
            weight = replace(weight, zeros=zeros.float().to(device))
        expected = rows.float() @ weight.dequantized().T + bias.float()
        return pack(weight, bias, dtype)(rows), expected

    return passes(library, trial)
