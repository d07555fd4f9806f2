"""Where the scales of a group's inputs go: into the module before it, so that the block computes the same.

What can take them is found by trial, not by names: scales of powers of two, which no rounding disturbs, must
leave the block's output as it is. A norm's weight can, mostly; the values' projection before attention's
output, if nothing else is between; the branch of a gated MLP that has no activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantization.calibration import Calibration, LinearGroup, linears

_MOST_CHANGED = 0.01
"""Of the output's elements, by float16's subnormal numbers. Its size would not do to compare with: a few
elements of a real model's hidden states are a thousand times as large as the others.
"""


@dataclass(frozen=True)
class Fold:
    """The last `channels` outputs of `module` take the scales of `group`.

    Input channel c of the group has the scale of output `index[c]`: with grouped queries several channels of
    attention share one of the values.
    """

    module: str
    group: LinearGroup
    index: Tensor

    @property
    def channels(self) -> int:
        """How many scales there are."""
        return int(self.index.max()) + 1

    def pooled(self, inputs: Tensor) -> Tensor:
        """The sums over the input channels that share a scale, which are equally many: [in] to [channels]."""
        return inputs.new_zeros(self.channels).index_add_(0, self.index, inputs)

    @torch.no_grad()
    def apply(self, block: nn.Module, scales: Tensor) -> None:
        """`scales` float32 [channels]."""
        for parameter in self._before(block):
            rows = parameter[-self.channels :]
            shape = (-1,) + (1,) * (rows.ndim - 1)
            rows.copy_(rows.float() / scales.view(shape))
        for weight in self._after(block):
            weight.copy_(weight.float() * scales[self.index])

    def _before(self, block: nn.Module) -> list[Tensor]:
        module = block.get_submodule(self.module)
        return [each.data for each in (module.weight, getattr(module, "bias", None)) if each is not None]

    def _after(self, block: nn.Module) -> list[Tensor]:
        return [block.get_submodule(name).weight.data for name in self.group.linears]

    def is_exact(self, calibration: Calibration) -> bool:
        """Whether the block's output stays the same. The block is left as it was."""
        block = calibration.block
        touched = self._before(block) + self._after(block)
        kept = [tensor.clone() for tensor in touched]
        before = calibration.probe()
        exponents = torch.arange(self.channels, device=self.index.device) % 3 - 1
        self.apply(block, torch.exp2(exponents.float()))
        after = calibration.probe()
        for tensor, old in zip(touched, kept, strict=True):
            tensor.copy_(old)
        return bool((after != before).float().mean() <= _MOST_CHANGED)


def find_fold(calibration: Calibration, groups: Sequence[LinearGroup], group: LinearGroup) -> Fold | None:
    """None where no module before the group can take its scales."""
    return next(
        (fold for fold in _candidates(calibration, groups, group) if fold.is_exact(calibration)), None
    )


def _candidates(
    calibration: Calibration, groups: Sequence[LinearGroup], group: LinearGroup
) -> Iterator[Fold]:
    modules = linears(calibration.block)
    width = modules[group.linears[0]].in_features
    device = modules[group.linears[0]].weight.device
    if group.norm is not None:
        yield Fold(group.norm, group, torch.arange(width, device=device))
        return
    before = [name for each in groups[: groups.index(group)] for name in each.linears]
    for name in reversed(before):
        for index in _indices(width, calibration.value_width, calibration.head_dim):
            if modules[name].out_features > int(index.max()):
                yield Fold(name, group, index.to(device))


def _indices(width: int, value_width: int, head_dim: int) -> list[Tensor]:
    """Channel for channel; or query heads to the heads of values."""
    channels = torch.arange(width)
    found = [channels]
    if value_width < width and width % value_width == 0:
        heads = channels // head_dim // (width // value_width)
        found.append(heads * head_dim + channels % head_dim)
    return found
