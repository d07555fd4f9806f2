"""Latent attention (MLA, DeepSeek-V2, 2024), absorbed: the pool keeps latents instead of keys and values.

A token's latent c is what `kv_b_proj` makes the keys and values of all heads of: K c and V c for a head with
weights K and V. Since q (K c) = (Kᵀ q) c, and the weighted sum of V c is V times that of c, heads attend to
latents: one KV head, whose keys are c with the rotated key behind it, and whose values are c itself.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.devices.torch import transformers_hook
from engine.linear.quantized import QuantizedLinear
from engine.linear.routed import RoutedLinear
from protocol.config import ServeConfig


class HeadProducts(nn.Module):
    """Multiplies each head's part of a row by the head's own weight."""

    def __init__(self, weight: Tensor) -> None:
        """`weight` is [heads, out, in], and stays where it is."""
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, heads, in] to [rows, heads, out]."""
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
    """Applies `kv_b_proj` to a layer's queries and to its attention's output, not to keys and values."""

    def __init__(self, weight: Tensor, key_dim: int, value_dim: int) -> None:
        """`weight` is [heads * (key_dim + value_dim), latent]."""
        super().__init__()
        heads = weight.unflatten(0, (-1, key_dim + value_dim))
        self.key_dim = key_dim
        self.to_latent = HeadProducts(heads[:, :key_dim].transpose(1, 2))
        self.to_value = HeadProducts(heads[:, key_dim:])

    def queries(self, rows: Tensor) -> Tensor:
        """[rows, heads, key_dim + rotated] to [rows, heads, latent + rotated]."""
        plain, rotated = rows[..., : self.key_dim], rows[..., self.key_dim :]
        return torch.cat([self.to_latent(plain), rotated], dim=-1)

    def values(self, attended: Tensor) -> Tensor:
        """[rows, heads, latent] to [rows, heads, value_dim]."""
        values: Tensor = self.to_value(attended)
        return values


def expansion_reason(model: PreTrainedModel, config: ServeConfig) -> str:
    """Why its keys and values are kept expanded; empty where it has no latents, or `absorb` keeps these."""
    if not any(hasattr(module, "kv_b_proj") for module in model.modules()):
        return ""
    if config.serves_adapters:
        return "adapters may change what they are made by"
    if model.device.type == "cuda" and config.deterministic:
        return "--deterministic has no products of single heads on a GPU"
    return "" if _latent_layers(model) else "this version of Transformers has them in no other form"


def absorb(model: PreTrainedModel) -> None:
    """Have the model's layers hand latents to our attention. With another, they do what they did."""
    for layer in _latent_layers(model):
        if isinstance(layer.kv_b_proj, QuantizedLinear):
            layer.kv_b_proj = layer.kv_b_proj.plain(model.dtype)
        weight = layer.kv_b_proj.weight.detach()
        layer.absorbed = Absorbed(weight, layer.qk_nope_head_dim, layer.v_head_dim)
        layer.expand_kv = types.MethodType(_keep_latents, layer)


def pack_absorbed(model: nn.Module) -> None:
    """Pack what `absorb` made, freeing the weights. Other attention than ours can't run then."""
    for layer in [module for module in model.modules() if hasattr(module, "absorbed")]:
        parts: Any = layer.absorbed
        if _fits(parts.to_latent) and _fits(parts.to_value):
            parts.to_latent = PackedHeadProducts(parts.to_latent)
            parts.to_value = PackedHeadProducts(parts.to_value)
            layer.kv_b_proj = None


def _keep_latents(layer: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In place of a layer's `expand_kv`: both are [1, 1, rows, size]. Values lie in the keys' memory."""
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
