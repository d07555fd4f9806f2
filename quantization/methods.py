"""In-place quantization of one block of a model, by method."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.linear.quantized import round_to_nearest
from engine.quantization.weight import CodeFormat, QuantizedWeight
from quantization import awq, gptq
from quantization.calibration import Calibration, linears
from quantization.folding import find_fold
from quantization.preparation import Recipe

Quantized = dict[str, QuantizedWeight]
"""Quantized weights by the names of a block's linear layers, in the block's order."""


def calibrate_block(recipe: Recipe, calibration: Calibration, log: Callable[[str], None]) -> Quantized:
    """Quantize the block and set its dequantized weights. `log` gets a line for each skipped part."""
    if recipe.method == "awq":
        return _awq_block(recipe, calibration, log)
    return _gptq_block(recipe, calibration)


def round_block(recipe: Recipe, block: nn.Module) -> Quantized:
    """Round to nearest, with one scale for each output channel."""
    format = CodeFormat(recipe.method)
    return {
        name: _replace(layer, round_to_nearest(layer.weight, format, layer.in_features))
        for name, layer in linears(block).items()
    }


def set_weights(block: nn.Module, quantized: Quantized) -> None:
    """Replace the block's weights with the dequantized values of `quantized`."""
    layers = linears(block)
    for name, weight in quantized.items():
        _replace(layers[name], weight)


def _awq_block(recipe: Recipe, calibration: Calibration, log: Callable[[str], None]) -> Quantized:
    assert recipe.group_size is not None
    layers = linears(calibration.block)
    groups = calibration.groups()
    moments = calibration.moments(groups)
    for group in groups:
        fold = find_fold(calibration, groups, group)
        if fold is None:
            log(f"{', '.join(group.linears)}: not scaled, as no module before can take the scales")
            continue
        weights = [layers[name].weight.float() for name in group.linears]
        found = moments[group]
        inputs = fold.pooled(found.mean_magnitudes)
        scales = awq.search_scales(
            weights, found.products, inputs, fold.index, recipe.bits, recipe.group_size
        )
        fold.apply(calibration.block, scales)
        moments[group] = found.divided(scales[fold.index])
    products = {name: moments[group].products for group in groups for name in group.linears}
    return {
        name: _replace(
            layer, awq.quantize(layer.weight.float(), products[name], recipe.bits, recipe.group_size)
        )
        for name, layer in layers.items()
    }


def _gptq_block(recipe: Recipe, calibration: Calibration) -> Quantized:
    """Quantize group by group. Each group is calibrated on the outputs of the quantized groups before it."""
    assert recipe.group_size is not None
    layers = linears(calibration.block)
    quantized = {}
    for group in calibration.groups():
        hessian = calibration.moments([group])[group].products
        for name in group.linears:
            weight = gptq.quantize(
                layers[name].weight.float(), hessian, recipe.bits, recipe.group_size, recipe.desc_act
            )
            quantized[name] = _replace(layers[name], weight)
    return quantized


@torch.no_grad()
def _replace(layer: nn.Linear, weight: QuantizedWeight) -> QuantizedWeight:
    layer.weight.copy_(weight.dequantized())
    return weight
