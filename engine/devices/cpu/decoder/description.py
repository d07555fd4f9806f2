"""A Transformers model as the native decoder reads it."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.devices.cpu.decoder.experts import experts_args, unfit_experts
from engine.devices.cpu.decoder.native_model import NativeModel
from engine.devices.cpu.decoder.structs import LatentArgs, LayerArgs, ModelArgs, RecurrentArgs, WeightsArgs
from engine.kv.state_layout import GRID
from engine.linear.packed_quantized import PackedQuantizedLinear
from engine.model.families import (
    ATTENTION,
    FAMILIES,
    LATENT,
    NOTHING,
    STATE_SPACE,
    Family,
    Mixer,
    Paths,
    linears,
)

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def unfit(model: PreTrainedModel) -> str | None:
    """Why the native decoder can't run the model; None if it can."""
    config = model.config
    name = type(model).__name__
    family = FAMILIES.get(name)
    if family is None:
        return f"{name} is not among {', '.join(FAMILIES)}"
    activations = ("relu2",) if family.blocks else ("silu", "swish")
    activation = getattr(config, "mlp_hidden_act", getattr(config, "hidden_act", "silu"))
    if activation not in activations:
        return f"its activation is {activation}"
    rotary = getattr(model.model, family.rotary, None)
    if rotary is not None and rotary.rope_type not in ROPE_TYPES:
        return f"its rotary embedding is of type {rotary.rope_type}"
    if family.routing is None and bool(getattr(config, "num_local_experts", 0)):
        return "it has experts"
    for number, layer in enumerate(model.model.layers):
        for mixer, _ in family.branches(layer):
            fault = None if mixer is None else _unfit_mixer(getattr(layer, mixer.path), mixer)
            if fault is not None:
                return f"layer {number} {fault}"
        if (routing := family.routing_of(layer)) is not None:
            fault = unfit_experts(getattr(layer, routing.block), has_gate=not family.blocks)
            if fault is not None:
                return fault
        if not all(map(_can_join, family.products(layer))):
            return f"layer {number} has products of one input that are quantized in several ways"
    return None


def _unfit_mixer(module: Any, mixer: Mixer) -> str | None:
    if mixer.kind == ATTENTION:
        return None
    if mixer.kind == LATENT:
        return None if hasattr(module, "absorbed") else "keeps keys and values, not latents"
    reach = getattr(module, mixer.conv).kernel_size[0]
    return f"has a convolution of {reach} tokens, of at most {GRID + 1}" if reach > GRID + 1 else None


def _can_join(linears: Sequence[nn.Module]) -> bool:
    packed = [linear.packed for linear in linears if isinstance(linear, PackedQuantizedLinear)]
    alike = all(part.is_like(packed[0]) for part in packed)
    with_bias = [getattr(linear, "bias", None) is not None for linear in linears]
    return len(packed) in (0, len(linears)) and alike and len(set(with_bias)) <= 1


class Description(NativeModel):
    """A model on the CPU, of one of `DTYPES`, for which `unfit` finds nothing, with at most so many
    `positions`.

    The model loses the weights of its layers, each as soon as it is packed.
    """

    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        super().__init__(model.get_input_embeddings().weight.dtype)
        config, decoder = model.config, model.model
        family = FAMILIES[type(model).__name__]
        mixers = ((layer, family.mixer(layer)) for layer in decoder.layers)
        attention, has_latents = next(
            (getattr(layer, mixer.path), mixer.kind == LATENT)
            for layer, mixer in mixers
            if mixer and mixer.kind in (ATTENTION, LATENT)
        )
        head_dim = attention.qk_head_dim if has_latents else attention.head_dim
        queries = config.num_attention_heads * head_dim
        self._recurrent: list[RecurrentArgs] = []
        self._latent: list[LatentArgs] = []
        self._head_products: list[ctypes.Array[WeightsArgs]] = []
        branches = zip(*map(family.branches, decoder.layers), strict=True)
        self.paths = [(number, paths) for alike in branches for number, (_, paths) in enumerate(alike)]
        taken = [self._take(layer, family) for layer in decoder.layers]
        count, layers = len(taken), list(itertools.chain(*zip(*taken, strict=True)))
        self.layers = (LayerArgs * len(layers))(*layers)
        for number in range(count, len(layers)):
            self.layers[number - count].beside = number
        embeddings = model.get_input_embeddings().weight
        self.model = ModelArgs(
            layers=ctypes.addressof(self.layers),
            num_layers=count,
            num_beside=len(layers) - count,
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            head_dim=head_dim,
            vocab=model.lm_head.out_features,
            products=num_weights(model) - embeddings.numel(),
            embeddings=self.keep(embeddings),
            final_norm=self.keep(getattr(decoder, family.final_norm).weight),
            head=self._head(model, family),
            **self.rotation(getattr(decoder, family.rotary, None), positions),
            opens_heads=not has_latents and attention.q_proj.out_features > queries,
            norms=family.norms,
            squares=family.blocks,
            norm_epsilon=getattr(config, family.epsilon),
            attention_scale=float(attention.scaling),
            **{name: getattr(config, name) for name in family.multipliers},
        )

    def _take(self, layer: Any, family: Family) -> list[LayerArgs]:
        """One for each of its mixers."""
        packed = [self._layer(layer, family, *branch) for branch in family.branches(layer)]
        layer.to("meta")
        return packed

    def _head(self, model: Any, family: Family) -> WeightsArgs:
        head = self.weights(model.lm_head)
        if family.head_multiplier is not None:
            multiplier = getattr(model.config, family.head_multiplier)
            head.multipliers = self._keep_multipliers(torch.full((head.outputs,), multiplier))
        return head

    def _layer(self, layer: Any, family: Family, mixer: Mixer | None, paths: Paths) -> LayerArgs:
        args = LayerArgs(
            mixer=NOTHING if mixer is None else mixer.kind,
            input_norm=self.keep(_weight(layer, family.input_norm)),
            mlp_norm=self.keep(_weight(layer, family.mlp_norm)),
        )
        fields = {"qkv": paths.inputs, "output": paths.output, "gate_up": paths.gate_up, "down": paths.down}
        for field, names in fields.items():
            if names:
                setattr(args, field, self._product(layer, family, names))
        if (routing := family.routing_of(layer)) is not None:
            args.experts = self.keep_experts(experts_args(self, layer, routing))
        if mixer is None:
            return args
        if mixer.input_multiplier is not None:
            args.input_multiplier = attrgetter(mixer.input_multiplier)(layer)
        if mixer.kind == ATTENTION:
            args.query_norm = self.keep(_weight(layer, family.query_norm))
            args.key_norm = self.keep(_weight(layer, family.key_norm))
            args.window = attention_window(getattr(layer, mixer.path))
        elif mixer.kind == LATENT:
            args.query_norm = self.keep(_weight(layer, f"{mixer.path}.q_a_layernorm"))
            args.key_norm = self.keep(_weight(layer, f"{mixer.path}.kv_a_layernorm"))
            args.latent = self._take_latent(getattr(layer, mixer.path))
        else:
            gates = linears(layer, paths.gates)
            args.recurrent = self._take_recurrent(getattr(layer, mixer.path), mixer, gates)
        return args

    def _take_latent(self, module: Any) -> int:
        args = LatentArgs(
            to_latent=self._of_heads(module.absorbed.to_latent.weight),
            to_value=self._of_heads(module.absorbed.to_value.weight),
            norm_epsilon=module.kv_a_layernorm.variance_epsilon,
        )
        if module.q_b_proj is not None:
            args.queries = self.weights(module.q_b_proj)
        self._latent.append(args)
        return ctypes.addressof(args)

    def _of_heads(self, weights: Tensor) -> int:
        heads = (WeightsArgs * len(weights))(*map(self.matrix, weights))
        self._head_products.append(heads)
        return ctypes.addressof(heads)

    def _product(self, layer: Any, family: Family, names: Sequence[str]) -> WeightsArgs:
        joined = linears(layer, names)
        product = self.weights(*joined)
        multipliers = [torch.ones(linear.out_features) for linear in joined]
        for values, name in zip(multipliers, names, strict=True):
            if name in family.output_multipliers:
                values *= torch.as_tensor(attrgetter(family.output_multipliers[name])(layer)).flatten()
        product.multipliers = self._keep_multipliers(torch.cat(multipliers))
        return product

    def _keep_multipliers(self, values: Tensor) -> int | None:
        return None if bool((values == 1).all()) else self.keep_floats(values)

    def _take_recurrent(self, module: Any, mixer: Mixer, gates: Sequence[Any]) -> int:
        conv, decays = getattr(module, mixer.conv), module.get_submodule(mixer.decays)
        args = RecurrentArgs(
            number=len(self._recurrent),
            taps=self.keep_floats(conv.weight.squeeze(1).t()),
            bias=self.keep_floats(conv.bias),
            shifts=self.keep_floats(getattr(decays, "dt_bias", None)),
            skips=self.keep_floats(getattr(module, "D", None)),
            norm=self.keep(_weight(module, mixer.norm)),
            interleaved=mixer.interleaved,
        )
        if mixer.kind == STATE_SPACE:
            args.group = _group_size(module.norm)
            args.norms_first = getattr(module.norm, "norm_before_gate", False)
            args.shortest, args.longest = module.time_step_limit
        if hasattr(decays, "A_log"):
            args.rates = self.keep_floats(-decays.A_log.float().exp())
        if gates:
            args.gates = self.weights(*gates)
        if mixer.low_rank:
            args.decays, args.opening = (self.weights(module.get_submodule(name)) for name in mixer.low_rank)
        self._recurrent.append(args)
        return ctypes.addressof(args)


def _weight(module: Any, path: str) -> Tensor | None:
    """Of the module at this path, if there is one."""
    for name in (*path.split("."), "weight"):
        module = getattr(module, name, None)
    return module


def _group_size(norm: Any) -> int:
    """How many values a state space's norm takes together; 0 where there is none."""
    if not hasattr(norm, "weight"):
        return 0
    return getattr(norm, "group_size", None) or len(norm.weight) // norm.n_groups


def num_weights(model: nn.Module) -> int:
    """Quantized or not."""
    quantized = [module for module in model.modules() if isinstance(module, PackedQuantizedLinear)]
    count = sum(linear.in_features * linear.out_features for linear in quantized)
    return count + sum(parameter.numel() for parameter in model.parameters())


def attention_window(attention: Any) -> int:
    """Mistral's and Mixtral's layers read theirs from the configuration; 0 for none."""
    reads_config = type(attention).__name__ in ("MistralAttention", "MixtralAttention")
    holder = attention.config if reads_config else attention
    return getattr(holder, "sliding_window", None) or 0
