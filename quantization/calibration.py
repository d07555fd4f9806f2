"""Block-by-block runs of a model on calibration text. Only one block's activations are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.model.families import is_never_rounded
from protocol.errors import ConfigError

_STRIP = 1024
"""The number of rows of the matrix of moments that one product updates."""
_SAME = 1e-2
"""Largest difference of a replayed block's output in the model's dtype, as a share of the output's root mean
square.
"""


@dataclass(frozen=True)
class LinearGroup:
    """A block's linear layers that read the same tensor, by name, in the order in which they run.

    `norm` is the module that wrote this tensor, if it has one weight for each channel.
    """

    linears: tuple[str, ...]
    norm: str | None = None


@dataclass
class Moments:
    """The sums of x x^T, float32 [in, in], and of |x| over a group's inputs x at all calibration tokens.

    Each x is divided by its root mean square. In some layers the inputs of a few tokens, such as a text's
    first, are hundreds of times as large as all others; without the division these tokens alone would
    determine the sums.

    `add` skips most products below the diagonal, which saves a third of the time; `complete` fills them in.
    """

    products: Tensor
    magnitudes: Tensor
    tokens: int = 0

    @classmethod
    def of_width(cls, width: int, device: torch.device) -> Moments:
        return cls(torch.zeros(width, width, device=device), torch.zeros(width, device=device))

    def add(self, inputs: Tensor) -> None:
        rows = nn.functional.rms_norm(inputs.detach().flatten(0, -2).to(torch.float32), inputs.shape[-1:])
        for start in range(0, rows.shape[1], _STRIP):
            strip = self.products[start : start + _STRIP, start:]
            strip.addmm_(rows[:, start : start + _STRIP].T, rows[:, start:])
        self.magnitudes += rows.abs().sum(0)
        self.tokens += len(rows)

    def complete(self) -> None:
        self.products = self.products.triu() + self.products.triu(1).T

    @property
    def mean_magnitudes(self) -> Tensor:
        return self.magnitudes / max(1, self.tokens)

    def divided(self, scales: Tensor) -> Moments:
        """Return the moments of x / scales."""
        products = self.products / scales / scales.unsqueeze(1)
        return Moments(products, self.magnitudes / scales, self.tokens)


def find_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the decoder blocks and the name of their list. Raises `ConfigError` if the model has none."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ConfigError(f"--model: {model.config.model_type} has no list of its {count} decoder blocks")


def linears(block: nn.Module) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not is_never_rounded(name)
    }


@dataclass(frozen=True)
class _Call:
    """A block's other arguments, and the hidden states [1, length, hidden] before and after it."""

    arguments: dict[str, Any]
    hidden: Tensor
    output: Tensor


@dataclass
class Calibration:
    """A run in progress: the states [1, length, hidden] of each window before block `position`."""

    blocks: nn.ModuleList
    hidden: list[Tensor]
    head_dim: int
    value_width: int
    """Width of the attention values of all heads together."""
    _arguments: list[dict[str, Any]]
    position: int = field(default=0, init=False)

    @classmethod
    @torch.inference_mode()
    def begin(cls, model: PreTrainedModel, windows: Tensor) -> Calibration:
        """Run the model on `windows`, int64 [n, length] with n >= 2, up to its first block.

        Raises `ConfigError` for a model whose blocks cannot be run one by one.
        """
        _, blocks = find_blocks(model)
        rows = windows.to(model.device).split(1)
        first, second = _record(model, blocks, rows[0]), _record(model, blocks, rows[1])
        begun = cls(blocks, [], *_values_shape(model), [call.arguments for call in first])
        hidden = second[0].hidden
        for index, call in enumerate(second):
            if not call.output.isfinite().all():
                raise ConfigError(f"--model: the output of block {index} is not finite on the text of --data")
            hidden = begun._run(index, hidden)
            if not _close(hidden, call.output):
                raise ConfigError(
                    f"--model: block {index} of {model.config.model_type} depends on more than the hidden "
                    "states before it, so it cannot be calibrated; --method int8 and fp8 need no calibration"
                )
        begun.hidden = [_embed(model, blocks, row) for row in rows]
        return begun

    @property
    def block(self) -> nn.Module:
        return self.blocks[self.position]

    def probe(self) -> Tensor:
        """Return the block's output for the first window."""
        return self._run(self.position, self.hidden[0])

    def advance(self) -> None:
        """Run the current block on all windows and move to the next block."""
        self.hidden = [self._run(self.position, each) for each in self.hidden]
        self.position += 1

    def groups(self) -> list[LinearGroup]:
        """Return all linear layers of the block. A layer that does not run forms a group of its own."""
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}

        def note(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
            if names[module] in modules:
                inputs.setdefault(names[module], args[0])
            elif isinstance(output, Tensor) and _has_weight_per_channel(module, output):
                outputs[names[module]] = output

        names = {module: name for name, module in self.block.named_modules()}
        modules = linears(self.block)
        with ExitStack() as stack:
            for module in names:
                stack.callback(module.register_forward_hook(note).remove)
            self.probe()
        return _grouped(modules, inputs, outputs)

    def moments(self, groups: Iterable[LinearGroup]) -> dict[LinearGroup, Moments]:
        """Return the moments of each group's inputs in the block. Raises `ConfigError` if not finite."""
        modules = linears(self.block)
        found = {}
        with ExitStack() as stack:
            for group in groups:
                module = modules[group.linears[0]]
                found[group] = Moments.of_width(module.in_features, module.weight.device)
                hook = module.register_forward_pre_hook(
                    lambda _, args, moments=found[group]: moments.add(args[0])
                )
                stack.callback(hook.remove)
            for hidden in self.hidden:
                self._run(self.position, hidden)
        for group, moments in found.items():
            moments.complete()
            if not moments.products.isfinite().all():
                raise ConfigError(
                    f"--model: {group.linears[0]} of block {self.position} gets inputs that are not finite"
                )
        return found

    def _run(self, index: int, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return _first(self.blocks[index](hidden, **self._arguments[index]))


def _values_shape(model: PreTrainedModel) -> tuple[int, int]:
    """Return the head size and the width of the values of all heads together."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return head_dim, head_dim * (getattr(config, "num_key_value_heads", None) or heads)


def _grouped(
    modules: dict[str, nn.Linear], inputs: dict[str, Tensor], outputs: dict[str, Tensor]
) -> list[LinearGroup]:
    members: list[tuple[Tensor, list[str]]] = []
    for name, read in inputs.items():
        for tensor, names in members:
            if tensor is read:
                names.append(name)
                break
        else:
            members.append((read, [name]))
    norms = [
        next((name for name, output in outputs.items() if output is tensor), None) for tensor, _ in members
    ]
    groups = [LinearGroup(tuple(names), norm) for (_, names), norm in zip(members, norms, strict=True)]
    return groups + [LinearGroup((name,)) for name in modules if name not in inputs]


def _has_weight_per_channel(module: nn.Module, output: Tensor) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.shape == output.shape[-1:]


def _record(model: PreTrainedModel, blocks: Sequence[nn.Module], tokens: Tensor) -> list[_Call]:
    calls: list[tuple[dict[str, Any], Tensor]] = []
    outputs: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(_split(args, kwargs))

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(
                block.register_forward_hook(lambda _, __, output: outputs.append(_first(output))).remove
            )
        model(input_ids=tokens, use_cache=False)
    return [_Call(*call, output) for call, output in zip(calls, outputs, strict=True)]


class _ReachedError(Exception):
    """An exception that ends a forward pass at the first block."""


def _embed(model: PreTrainedModel, blocks: Sequence[nn.Module], tokens: Tensor) -> Tensor:
    """Return the hidden states that the first block gets."""
    found = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(_split(args, kwargs)[1])
        raise _ReachedError

    with ExitStack() as stack:
        stack.callback(blocks[0].register_forward_pre_hook(stop, with_kwargs=True).remove)
        try:
            model(input_ids=tokens, use_cache=False)
        except _ReachedError:
            return found[0]
    raise ConfigError(f"--model: {model.config.model_type} does not run its first decoder block")


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Split a block's arguments into those other than the hidden states, and the hidden states."""
    if args:
        return kwargs, args[0]
    return {name: value for name, value in kwargs.items() if name != "hidden_states"}, kwargs["hidden_states"]


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _close(hidden: Tensor, other: Tensor) -> bool:
    difference = (hidden.float() - other.float()).square().mean().sqrt()
    return bool(difference <= _SAME * other.float().square().mean().sqrt())
