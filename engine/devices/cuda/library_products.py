"""Linear layers with quantized weights that a library multiplies on a CUDA device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from engine.devices.cuda.libraries import Library, library_fault, passes
from engine.linear.quantized import round_to_nearest
from engine.quantization.weight import CodeFormat, QuantizedWeight

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
