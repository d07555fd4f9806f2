"""Products of linear layers that read one input, joined into one, on a CUDA device."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import linear

from engine.devices.cuda.adapters import AdaptedProduct
from engine.devices.cuda.library_products import LibraryLinear, join_library
from engine.devices.cuda.products import TiledLinear, concatenated, join
from engine.devices.torch.operations import multiplied, side_by_side
from engine.lora.table import Adapters
from engine.model.program import Layer, Product, Recurrent


class PlainWeight(NamedTuple):
    """A weight [outputs, inputs] and a bias [outputs]."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class SeveralWeights(NamedTuple):
    """Linear layers of one input that cannot be joined into one product."""

    linears: tuple[nn.Module, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return side_by_side([linear(x) for linear in self.linears])


Weight = PlainWeight | TiledLinear | LibraryLinear | SeveralWeights


class JoinedProduct(NamedTuple):
    """The joined weight of a `product`, the adapters' products that are added to its output, and the sum's
    factors, if any.
    """

    product: Product
    weight: Weight
    adapted: AdaptedProduct | None
    multipliers: Tensor | None

    def __call__(self, x: Tensor, adapters: Tensor | None) -> Tensor:
        """Multiply, and add the rows' `adapters`; None if no row can have one."""
        x = self.product.enter(x)
        out = self.weight(x)
        if self.adapted is not None and adapters is not None:
            self.adapted.add(out, x, adapters)
        return self.product.leave(multiplied(out, self.multipliers))


def packed(product: Product, adapters: Adapters | None) -> JoinedProduct:
    """Join the product's layers, whose weights become views of the joined one."""
    adapted = None if adapters is None else AdaptedProduct.of(list(product.paths), adapters)
    multipliers = product.multipliers
    if multipliers is not None:
        multipliers = multipliers.to(product.linears[0].weight.device)
    return JoinedProduct(product, joined(product.linears), adapted, multipliers)


def packed_of(layer: Layer, adapters: Adapters | None) -> dict[Product, JoinedProduct]:
    """Pack the layer's products. If a recurrent mixer's gates can be joined to its inputs they follow these
    in one product's outputs, and have no product of their own.
    """
    apart, found = [*layer.products()], {}
    for mixer in layer.mixers:
        if isinstance(mixer, Recurrent) and (both := mixer.inputs_and_gates) is not None:
            one = packed(both, adapters)
            if not isinstance(one.weight, SeveralWeights):
                found[mixer.inputs] = one
                apart = [each for each in apart if each not in (mixer.inputs, mixer.gates)]
    return found | {product: packed(product, adapters) for product in apart}


def stacked(linears: tuple[nn.Module, ...]) -> Tensor | None:
    """Return the weights [layers, outputs, inputs] of layers, which become views of them; None if the layers
    are not of one shape, are quantized or have biases.
    """
    if len({(each.in_features, each.out_features) for each in linears}) > 1:
        return None
    one = joined(linears)
    if isinstance(one, SeveralWeights | LibraryLinear) or one.bias is not None:
        return None
    if isinstance(one, TiledLinear) and one.format is not None:
        return None
    return one.weight.unflatten(0, (len(linears), -1))


def joined(linears: tuple[nn.Module, ...]) -> Weight:
    """Join layers of one input. Two decoders of the same layers share the joined weight."""
    tiled = [each for each in linears if isinstance(each, TiledLinear)]
    if len(tiled) == len(linears) and all(each.is_like(tiled[0]) for each in tiled):
        return join(tiled)
    by_library = [each for each in linears if isinstance(each, LibraryLinear)]
    if len(by_library) == len(linears) and (whole := join_library(by_library)) is not None:
        return whole
    plain = [each for each in linears if isinstance(each, nn.Linear)]
    if len(plain) < len(linears):
        return SeveralWeights(linears)
    weight = concatenated([each.weight.detach() for each in plain])
    biases = [each.bias for each in plain]
    if any(bias is not None for bias in biases):
        zeros = (each.weight.new_zeros(each.out_features) for each in plain)
        biases = [zero if bias is None else bias.detach() for bias, zero in zip(biases, zeros, strict=True)]
    bias = concatenated(biases)
    assert weight is not None
    for each, part in zip(plain, weight.split([each.out_features for each in plain]), strict=True):
        each.weight = nn.Parameter(part, requires_grad=False)
    return PlainWeight(weight, bias)
