"""Folding of a group's input scales into the module before it, so that the block computes the same.

A trial, not a name, decides which module can take the scales: scales that are powers of two, which cause no
rounding error, must leave the block's output unchanged. Usually a norm's weight can take them; so can the
value projection before attention's output projection, if no other module is between them, and the branch of a
gated MLP that has no activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantization.calibration import Calibration, LinearGroup, linears

_MOST_CHANGED = 0.01
"""Largest share of the output's elements that may change, as float16's subnormal numbers can cause. The size
of the change would be no measure: a few elements of a real model's hidden states are a thousand times as
large as the others.
"""


@dataclass(frozen=True)
class ScaleFold:
    """A fold of the scales of `group` into the last `channels` outputs of `module`.

    Input channel c of the group has the scale of output `index[c]`. With grouped queries, several input
    channels of attention's output projection share one channel of the values.
    """

    module: str
    group: LinearGroup
    index: Tensor

    @property
    def channels(self) -> int:
        return int(self.index.max()) + 1

    def pooled(self, inputs: Tensor) -> Tensor:
        """Sum over the input channels that share a scale, equally many each: [in] to [channels]."""
        return inputs.new_zeros(self.channels).index_add_(0, self.index, inputs)

    @torch.no_grad()
    def apply(self, block: nn.Module, scales: Tensor) -> None:
        """Divide the module's outputs by `scales`, float32 [channels], and multiply the group's weights."""
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
        """Return whether the fold leaves the block's output unchanged. Restore the block after the trial."""
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


def find_fold(
    calibration: Calibration, groups: Sequence[LinearGroup], group: LinearGroup
) -> ScaleFold | None:
    """Return the fold of the group's scales, or None if no module before the group can take them."""
    return next(
        (fold for fold in _candidates(calibration, groups, group) if fold.is_exact(calibration)), None
    )


def _candidates(
    calibration: Calibration, groups: Sequence[LinearGroup], group: LinearGroup
) -> Iterator[ScaleFold]:
    modules = linears(calibration.block)
    width = modules[group.linears[0]].in_features
    device = modules[group.linears[0]].weight.device
    if group.norm is not None:
        yield ScaleFold(group.norm, group, torch.arange(width, device=device))
        return
    before = [name for each in groups[: groups.index(group)] for name in each.linears]
    for name in reversed(before):
        for index in _indices(width, calibration.value_width, calibration.head_dim):
            if modules[name].out_features > int(index.max()):
                yield ScaleFold(name, group, index.to(device))


def _indices(width: int, value_width: int, head_dim: int) -> list[Tensor]:
    """Return the possible orders: one scale for each channel, or one for each channel of the KV heads."""
    channels = torch.arange(width)
    found = [channels]
    if value_width < width and width % value_width == 0:
        heads = channels // head_dim // (width // value_width)
        found.append(heads * head_dim + channels % head_dim)
    return found
