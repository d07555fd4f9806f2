"""Latent attention (MLA, DeepSeek-V2, 2024), absorbed: the pool keeps latents instead of keys and values.

From a token's latent c, `kv_b_proj` makes the keys K c and values V c of each head, with weights K and V.
Since q (K c) = (Kᵀ q) c, and the weighted sum of V c is V times the weighted sum of c, heads can attend to
latents: one KV head, whose keys are c followed by the rotated key, and whose values are c itself.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.devices.torch import transformers_hook
from engine.linear.experts import RoutedLinear
from engine.linear.quantized import QuantizedLinear
from engine.model.families import FAMILIES
from protocol.config import ServeConfig


class HeadProducts(nn.Module):
    """A product of each head's part of a row with the head's own weight."""

    def __init__(self, weight: Tensor) -> None:
        """Make the products. `weight` is [heads, out, in], and is not copied."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [rows, heads, in] to [rows, heads, out]."""
        return torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)


class PackedHeadProducts(nn.Module):
    """Head products by our kernel in bfloat16 on the CPU: a row has the same bits in every batch."""

    heads: Tensor

    def __init__(self, products: HeadProducts) -> None:
        super().__init__()
        self.routed = RoutedLinear(list(products.weight), None)
        self.register_buffer("heads", torch.arange(len(products.weight)))

    def forward(self, x: Tensor) -> Tensor:
        rows, heads, size = x.shape
        return self.routed(x.reshape(rows * heads, size), self.heads.repeat(rows)).view(rows, heads, -1)


class Absorbed(nn.Module):
    """The halves of `kv_b_proj`, applied to queries and attention outputs instead of keys and values."""

    def __init__(self, weight: Tensor, key_dim: int, value_dim: int) -> None:
        """Split `weight`, [heads * (key_dim + value_dim), latent]."""
        super().__init__()
        heads = weight.unflatten(0, (-1, key_dim + value_dim))
        self.key_dim = key_dim
        self.to_latent = HeadProducts(heads[:, :key_dim].transpose(1, 2))
        self.to_value = HeadProducts(heads[:, key_dim:])

    def queries(self, rows: Tensor) -> Tensor:
        """Map [rows, heads, key_dim + rotated] to [rows, heads, latent + rotated]."""
        plain, rotated = rows[..., : self.key_dim], rows[..., self.key_dim :]
        return torch.cat([self.to_latent(plain), rotated], dim=-1)

    def values(self, attended: Tensor) -> Tensor:
        """Map [rows, heads, latent] to [rows, heads, value_dim]."""
        values: Tensor = self.to_value(attended)
        return values


def expansion_reason(model: PreTrainedModel, config: ServeConfig, device: torch.device) -> str:
    """Return why keys and values stay expanded; "" if the model has no latents or `absorb` keeps them."""
    if not any(hasattr(module, "kv_b_proj") for module in model.modules()):
        return ""
    if config.serves_adapters:
        return "adapters may change what they are made by"
    is_program = config.compile == "auto" and type(model).__name__ in FAMILIES
    if device.type == "cuda" and config.deterministic and not is_program:
        return "--deterministic has no products of single heads by a model's own modules on a GPU"
    return "" if _latent_layers(model) else "this version of Transformers has them in no other form"


def absorb(model: PreTrainedModel) -> None:
    """Make the model's layers pass latents to our attention. With another attention they work as before."""
    for layer in _latent_layers(model):
        if isinstance(layer.kv_b_proj, QuantizedLinear):
            layer.kv_b_proj = layer.kv_b_proj.plain(model.dtype)
        weight = layer.kv_b_proj.weight.detach()
        layer.absorbed = Absorbed(weight, layer.qk_nope_head_dim, layer.v_head_dim)
        layer.expand_kv = types.MethodType(_keep_latents, layer)


def pack_absorbed(model: nn.Module) -> None:
    """Pack the products made by `absorb`, freeing their weights. From then on only our attention works."""
    for layer in [module for module in model.modules() if hasattr(module, "absorbed")]:
        parts: Any = layer.absorbed
        if _fits(parts.to_latent) and _fits(parts.to_value):
            parts.to_latent = PackedHeadProducts(parts.to_latent)
            parts.to_value = PackedHeadProducts(parts.to_value)
            layer.kv_b_proj = None


def _keep_latents(layer: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Replace a layer's `expand_kv`. Both results are [1, 1, rows, size]; values are a view of the keys."""
    if layer.config._attn_implementation not in (transformers_hook.NAME, transformers_hook.PROBE_NAME):
        expanded: tuple[Tensor, Tensor] = type(layer).expand_kv(layer, latent, rotated)
        return expanded
    keys = torch.cat([latent, rotated], dim=-1)
    return keys, keys[..., : latent.shape[-1]]


def _latent_layers(model: nn.Module) -> list[Any]:
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "expand_kv")]
    return [layer for layer in layers if getattr(layer.kv_b_proj, "bias", None) is None]


def _fits(products: Any) -> bool:
    is_plain = isinstance(products, HeadProducts)
    return is_plain and products.weight.dtype is torch.bfloat16 and products.weight.shape[2] % 2 == 0
