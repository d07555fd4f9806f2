"""Some of a model's layers as the native decoder runs them, in the model's own memory or rounded."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from engine.devices.cpu.decoder.native_model import PRODUCTS, NativeModel
from engine.devices.cpu.decoder.structs import LayerArgs, ModelArgs, WeightsArgs
from engine.linear.packed import unpacked
from engine.linear.packed_quantized import fits, packed
from engine.linear.rounding import group_size, round_to_nearest
from engine.quantization.weight import CodeFormat


class PartialDescription(NativeModel):
    """`num_rounded` counts the products with rounded weights."""

    def __init__(self, whole: NativeModel, kept: Sequence[int], format: CodeFormat | None) -> None:
        super().__init__(whole.dtype)
        self._whole = whole  # which owns most of the memory
        self.num_rounded = 0
        layers = [self._layer(whole.layers[layer], format) for layer in kept]
        self.model = ModelArgs.from_buffer_copy(whole.model)
        self.model.num_layers = len(layers)
        for layer in layers[:]:
            if layer.beside:
                second = self._layer(whole.layers[layer.beside], format)
                layer.beside = len(layers)
                layers.append(second)
        self.model.num_beside = len(layers) - len(kept)
        self.layers = (LayerArgs * len(layers))(*layers)
        self.model.layers = ctypes.addressof(self.layers)
        self.count_products()

    def _layer(self, whole: LayerArgs, format: CodeFormat | None) -> LayerArgs:
        layer = LayerArgs.from_buffer_copy(whole)
        if format is not None:
            for name in PRODUCTS:
                setattr(layer, name, self._rounded(getattr(whole, name), format))
        return layer

    def _rounded(self, whole: WeightsArgs, format: CodeFormat) -> WeightsArgs:
        """Or as they are, where the format does not fit them."""
        group = group_size(format, whole.inputs)
        if group is None or whole.values is None:  # quantized, or of a product that there is not
            return whole
        weight = unpacked(self._whole.kept(whole.values))[: whole.outputs]
        rounded = round_to_nearest(weight, format, group)
        bias = None if whole.bias is None else self._whole.kept(whole.bias)
        if self.dtype is not torch.bfloat16:  # which the kernel of rounded weights takes
            args = self.matrix(rounded.dequantized(), bias)
        elif fits(rounded):
            args = self.keep_quantized(packed(rounded), bias)
        else:
            return whole
        self.num_rounded += 1
        args.multipliers = whole.multipliers
        return args
