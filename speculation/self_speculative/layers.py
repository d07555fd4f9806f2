"""Which of the model's layers draft, and the model with these alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import msgspec
from torch import nn
from transformers import PreTrainedModel

from protocol.errors import ConfigError
from protocol.speculation import SpeculativeConfig

_FLAG = "--speculative-config"


def with_defaults(options: SpeculativeConfig, num_layers: int, *, can_round: bool) -> SpeculativeConfig:
    """Fill in the layers and the format that draft, where the configuration names none.

    All layers in int4, if it `can_round` them: a model that was not trained for it bears that much better
    than to lose layers. Elsewhere every second layer, with the first and the last, which matter most.
    """
    if options.skip_layers or options.exit_layer is not None or options.quantization is not None:
        return options
    if can_round:
        return msgspec.structs.replace(options, quantization="int4")
    return msgspec.structs.replace(options, skip_layers=list(range(1, num_layers - 1, 2)))


def kept_layers(options: SpeculativeConfig, num_layers: int) -> list[int]:
    """Numbers of those that draft, ascending. Raises `ConfigError` that names the field and its limit."""
    if options.exit_layer is not None:
        if options.exit_layer >= num_layers:
            raise ConfigError(
                f"{_FLAG}: exit_layer: must be below the model's {num_layers} layers, "
                f"got {options.exit_layer}"
            )
        return list(range(options.exit_layer))
    skipped = set(options.skip_layers)
    if beyond := sorted(layer for layer in skipped if layer >= num_layers):
        raise ConfigError(
            f"{_FLAG}: skip_layers: the model's layers are 0 to {num_layers - 1}, got {beyond[0]}"
        )
    if len(skipped) == num_layers:
        raise ConfigError(f"{_FLAG}: skip_layers: at least one of the model's {num_layers} layers must draft")
    return [layer for layer in range(num_layers) if layer not in skipped]


def with_layers(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """The model with these of its layers, which share its weights and keep their numbers in its KV.

    Raises `ConfigError` for a model whose layers are not in one list, or whose configuration does not list
    their kinds.
    """
    tensors = [*model.parameters(), *model.buffers()]
    part = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    config = part.config.get_text_config(decoder=True)
    stacks = [
        module
        for module in part.modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if len(stacks) != 1:
        raise ConfigError(f"{_FLAG}: method: {model.config.model_type} has no list of layers to draft with")
    stacks[0]._modules = {str(place): stacks[0][layer] for place, layer in enumerate(kept)}
    kinds = getattr(config, "layer_types", None)
    config.num_hidden_layers = len(kept)
    kept_kinds = [kinds[layer] for layer in kept] if kinds is not None else None
    if kept_kinds is not None and [*config.layer_types] != kept_kinds:
        try:
            config.layer_types = kept_kinds
        except AttributeError as error:
            raise ConfigError(
                f"{_FLAG}: skip_layers: the kinds of {model.config.model_type}'s layers follow from their "
                "numbers, so only its last layers can be skipped"
            ) from error
    return part
