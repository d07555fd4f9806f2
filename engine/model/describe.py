"""Description of a Transformers model as a program, by the table of families."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import moe

from engine.linear.experts import ExpertsModule, fused_experts
from engine.model.families import FAMILIES, ExpertNormNames, Family, MixerNames, RoutingNames
from engine.model.program import (
    SWIGLU_LIMIT,
    SWIGLU_SLOPE,
    Activation,
    Attention,
    ExpertNorms,
    Experts,
    LatentAttention,
    Layer,
    MixerKind,
    Mlp,
    ModelProgram,
    Norm,
    NormKind,
    Product,
    Recurrent,
    Rotation,
    Score,
    TokenInput,
    TokenVectors,
)

STATIC_ROTATIONS = ("default", "linear", "llama3", "proportional", "yarn")
"""Types of rotary embeddings whose angles depend only on positions."""

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "relu2": Activation.RELU2,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
"""Activations by Transformers' names."""

_READ_WINDOW_FROM_CONFIG = ("MistralAttention", "MixtralAttention")


class UndescribedModelError(ValueError):
    """A model that no family describes; the message says why."""


def describe(model: PreTrainedModel) -> ModelProgram:
    """Describe a model; the program refers to its weights. Raises UndescribedModelError."""
    name = type(model).__name__
    family = FAMILIES.get(name)
    if family is None:
        raise UndescribedModelError(f"{name} is not among {', '.join(FAMILIES)}")
    return _Describer(model, family).program()


def activation_of(name: str) -> Activation:
    """Return the activation by Transformers' name. Raises UndescribedModelError."""
    if name not in ACTIVATIONS:
        raise UndescribedModelError(f"its activation is {name}")
    return ACTIVATIONS[name]


def gate_of(experts: Any) -> Activation | None:
    """Return the activation of Transformers' experts with gates; None if it is not known."""
    if experts.is_concatenated:
        names = (getattr(experts.config, field, None) for field in ("hidden_act", "hidden_activation"))
        is_usual = type(experts)._apply_gate is moe._default_apply_gate
        return ACTIVATIONS.get(next(filter(None, names), "")) if is_usual else None
    how = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    return Activation.CLAMPED_SWIGLU if how == (SWIGLU_SLOPE, SWIGLU_LIMIT) else None


def rotations_of(rotary: Any, *, is_half: bool = False) -> dict[str | None, Rotation]:
    """Return a Transformers rotary embedding's rotations by layer type; None is for all types. Raises
    UndescribedModelError.
    """
    if rotary is None:
        return {}
    types = rotary.rope_type if isinstance(rotary.rope_type, dict) else {None: rotary.rope_type}
    for rope_type in types.values():
        if rope_type not in STATIC_ROTATIONS:
            raise UndescribedModelError(f"its rotary embedding is of type {rope_type}")
    return {kind: Rotation(rotary, kind, is_half) for kind in types}


class _Describer:
    def __init__(self, model: Any, family: Family) -> None:
        self._model, self._decoder, self._config = model, model.model, model.config
        self._family = family
        self._activation = activation_of(getattr(self._config, family.activation, "silu"))
        self._epsilon: float = getattr(self._config, family.epsilon)
        rotary = getattr(self._decoder, family.rotary, None)
        self._rotations = rotations_of(rotary, is_half=family.is_half_rotary)
        self._number = itertools.count()
        if family.routing is None and bool(getattr(self._config, "num_local_experts", 0)):
            raise UndescribedModelError("it has experts")
        if getattr(self._config, "attn_logit_softcapping", None):
            raise UndescribedModelError("it has attn_logit_softcapping")

    def program(self) -> ModelProgram:
        family, head = self._family, self._model.lm_head
        multipliers = None
        if family.head_multiplier is not None:
            factor = getattr(self._config, family.head_multiplier)
            multipliers = _unless_ones(torch.full((head.out_features,), factor))
        embeddings = self._model.get_input_embeddings()
        multiplier = self._configured(family.embedding_multiplier) * embedding_scale(embeddings)
        return ModelProgram(
            name=type(self._model).__name__,
            embeddings=embeddings.weight,
            layers=tuple(itertools.starmap(self._layer, enumerate(self._decoder.layers))),
            final_norm=self._norm(self._decoder, family.final_norm),
            head=Product((head,), multipliers=multipliers),
            embedding_multiplier=multiplier,
            residual_multiplier=self._configured(family.residual_multiplier),
            logits_divisor=self._configured(family.logits_divisor),
            logits_cap=getattr(self._config, "final_logit_softcapping", None) or 0.0,
            token_vectors=self._token_vectors(),
        )

    def _token_vectors(self) -> TokenVectors | None:
        decoder = self._decoder
        if not getattr(self._config, "hidden_size_per_layer_input", 0):
            return None
        embeddings = decoder.embed_tokens_per_layer
        norm = self._norm(decoder, "per_layer_projection_norm")
        assert norm is not None
        return TokenVectors(
            embeddings=embeddings.weight,
            multiplier=embedding_scale(embeddings),
            product=Product((decoder.per_layer_model_projection,), ("model.per_layer_model_projection",)),
            factor=decoder.per_layer_model_projection_scale,
            norm=norm,
            sum_factor=decoder.per_layer_input_scale,
        )

    def _token_input(self, number: int, layer: Any) -> TokenInput | None:
        if not getattr(self._config, "hidden_size_per_layer_input", 0):
            return None
        gate, output = (
            self._product(number, layer, [name]) for name in ("per_layer_input_gate", "per_layer_projection")
        )
        norm = self._norm(layer, "post_per_layer_input_norm")
        assert norm is not None
        return TokenInput(layer.layer_idx, gate, output, norm, self._activation)

    def _configured(self, name: str | None) -> float:
        return 1.0 if name is None else getattr(self._config, name)

    def _norm(self, module: Any, path: str, epsilon: float | None = None) -> Norm | None:
        weight = _tensor(module, f"{path}.weight")
        return None if weight is None else Norm(weight, epsilon or self._epsilon, self._family.norms)

    def _layer(self, number: int, layer: Any) -> Layer:
        family = self._family
        try:
            mixers = tuple(self._mixer(number, layer, names) for names in family.mixers_of(layer))
        except UndescribedModelError as error:
            raise UndescribedModelError(f"layer {number} {error}") from None
        mlp_norm, mlp, experts = None, None, None
        if not (family.is_blocks and mixers):
            mlp_norm = self._norm(layer, family.mlp_norm)
            routing = family.routing_of(layer)
            mlp = self._mlp(number, layer, routing)
            experts = None if routing is None else self._experts(number, layer, routing)
        return Layer(
            mixers,
            self._norm(layer, family.input_norm),
            mlp_norm,
            mlp,
            experts,
            mixed_norm=None if family.mixed_norm is None else self._norm(layer, family.mixed_norm),
            made_norm=None if family.made_norm is None else self._norm(layer, family.made_norm),
            token_input=self._token_input(number, layer),
            multiplier=None if family.multiplier is None else _tensor(layer, family.multiplier),
        )

    def _product(self, number: int, layer: nn.Module, paths: Sequence[str]) -> Product:
        linears = tuple(map(layer.get_submodule, paths))
        factors = [torch.ones(linear.out_features) for linear in linears]
        for values, path in zip(factors, paths, strict=True):
            if path in self._family.output_multipliers:
                multiplier = attrgetter(self._family.output_multipliers[path])(layer)
                values *= torch.as_tensor(multiplier).flatten().to(values.device)
        names = tuple(f"model.layers.{number}.{path}" for path in paths)
        return Product(linears, names, _unless_ones(torch.cat(factors)))

    def _mixer(self, number: int, layer: Any, names: MixerNames) -> Attention | LatentAttention | Recurrent:
        module = getattr(layer, names.path)
        product = partial(self._product, number, layer)
        inputs = [f"{names.path}.{name}" for name in names.inputs if getattr(module, name, None) is not None]
        multiplier = names.input_multiplier
        common: dict[str, Any] = {
            "inputs": product(inputs),
            "output": product([f"{names.path}.{names.output}"]),
            "input_multiplier": 1.0 if multiplier is None else attrgetter(multiplier)(layer),
        }
        if names.kind is MixerKind.ATTENTION:
            return self._attention(layer, module, common)
        if names.kind is MixerKind.LATENT:
            return self._latent(module, common)
        if names.gates:
            common["gates"] = product([f"{names.path}.{name}" for name in names.gates])
        return self._recurrent(module, names, common)

    def _attention(self, layer: Any, module: Any, common: dict[str, Any]) -> Attention:
        heads = self._config.num_attention_heads
        has_sides = [getattr(module, name, None) is not None for name in ("k_proj", "v_proj")]
        return Attention(
            **common,
            value_norm=_unweighted(module, self._epsilon),
            sides=sum(has_sides),
            source=None if any(has_sides) else self._source(module),
            layer=module.layer_idx,
            heads=heads,
            head_dim=module.head_dim,
            scale=float(module.scaling),
            rotation=self._rotations.get(getattr(module, "layer_type", None), self._rotations.get(None)),
            query_norm=self._norm(layer, self._family.query_norm),
            key_norm=self._norm(layer, self._family.key_norm),
            window=_window(module),
            is_gated=module.q_proj.out_features > heads * module.head_dim,
            sinks=_tensor(module, "sinks"),
        )

    def _source(self, module: Any) -> int:
        """Return the layer of an attention module's type that keeps its keys and values for others."""
        for layer in self._decoder.layers:
            kept = layer.self_attn
            if kept.store_full_length_kv and kept.layer_type == module.layer_type:
                return int(kept.layer_idx)
        raise UndescribedModelError("takes its keys and values from a layer that is not there")

    def _latent(self, module: Any, common: dict[str, Any]) -> LatentAttention:
        if not hasattr(module, "absorbed"):
            raise UndescribedModelError("keeps keys and values, not latents")
        epsilon = module.kv_a_layernorm.variance_epsilon
        key_norm = self._norm(module, "kv_a_layernorm", epsilon)
        assert key_norm is not None
        return LatentAttention(
            **common,
            layer=module.layer_idx,
            heads=self._config.num_attention_heads,
            head_dim=module.qk_head_dim,
            scale=float(module.scaling),
            queries=module.q_b_proj,
            query_norm=self._norm(module, "q_a_layernorm", epsilon),
            key_norm=key_norm,
            to_latent=module.absorbed.to_latent,
            to_value=module.absorbed.to_value,
            rotation=self._rotations.get(None),
            in_pairs=getattr(self._config, "rope_interleave", False),
        )

    def _recurrent(self, module: Any, names: MixerNames, common: dict[str, Any]) -> Recurrent:
        conv, decays = getattr(module, names.conv), module.get_submodule(names.decays)
        decay = _tensor(decays, "A_log")
        if names.kind is MixerKind.STATE_SPACE:
            norm = module.norm
            common["group"] = _group_size(norm)
            common["norms_first"] = getattr(norm, "norm_before_gate", False)
            common["shortest"], common["longest"] = module.time_step_limit
        if names.low_rank:
            common["decays"], common["opening"] = map(module.get_submodule, names.low_rank)
        weight = _tensor(module, f"{names.norm}.weight")
        kind = NormKind.PLAIN if names.kind is MixerKind.DELTA else NormKind.EXACT
        hooked: int | None = getattr(module, "recurrent_number", None)
        return Recurrent(
            kind=names.kind,
            **common,
            number=next(self._number) if hooked is None else hooked,
            taps=conv.weight.squeeze(1),
            bias=conv.bias,
            rates=None if decay is None else -decay.float().exp(),
            shifts=_tensor(decays, "dt_bias"),
            skips=_tensor(module, "D"),
            norm=None if weight is None else Norm(weight, self._epsilon, kind),
            is_interleaved=names.is_interleaved,
        )

    def _mlp(self, number: int, layer: Any, routing: RoutingNames | None) -> Mlp | None:
        gate_up, down = self._family.gate_up, self._family.down
        if routing is not None:
            if routing.shared is None:
                return None
            gate_up = tuple(f"{routing.shared}.{path.rpartition('.')[2]}" for path in gate_up)
            down = f"{routing.shared}.{down.rpartition('.')[2]}"
        first, second = (self._product(number, layer, paths) for paths in (gate_up, (down,)))
        return Mlp(first, second, self._activation, self._family.is_gated)

    def _experts(self, number: int, layer: Any, names: RoutingNames) -> Experts:
        holder = layer.get_submodule(names.block)
        activation = _activation_of_experts(holder, self._family.is_gated) or self._activation
        router = holder.get_submodule(names.router)
        weight = _tensor(router, "weight")
        if weight is None or weight.ndim != 2 or not weight.is_floating_point():
            raise UndescribedModelError("its router is packed or quantized")
        shared_gate = None
        if names.shared_gate is not None:
            shared_gate = self._product(number, layer, [f"{names.block}.{names.shared_gate}"])
        return Experts(
            holder=holder,
            router=weight,
            router_bias=_tensor(router, "bias"),
            chosen=getattr(router, "top_k", None) or self._config.top_k_experts,
            score=names.score,
            preferences=None if names.preferences is None else _tensor(holder, names.preferences),
            groups=getattr(router, "num_group", 1),
            open_groups=getattr(router, "topk_group", 1),
            normalizes=getattr(router, "norm_topk_prob", names.score is not Score.CHOSEN_SOFTMAX),
            least_sum=names.least_sum,
            scaling=getattr(router, "routed_scaling_factor", 1.0),
            is_exact=names.is_exact,
            rounds=names.rounds,
            shared_gate=shared_gate,
            activation=activation,
            is_gated=self._family.is_gated,
            factors=None if names.factors is None else _tensor(holder, names.factors),
            norms=None if names.norms is None else self._expert_norms(holder, names.norms),
        )

    def _expert_norms(self, holder: Any, names: ExpertNormNames) -> ExpertNorms:
        scale = _tensor(holder, names.router)
        read, made, beside = (self._norm(holder, name) for name in (names.read, names.made, names.beside))
        assert scale is not None and read and made and beside
        router = Norm(scale.float() * len(scale) ** -0.5, self._epsilon, self._family.norms)
        return ExpertNorms(router, read, made, beside)


def embedding_scale(embeddings: Any) -> float:
    """Return the factor of an embedding module, rounded to its weights' dtype."""
    scale = getattr(embeddings, "scalar_embed_scale", getattr(embeddings, "embed_scale", None))
    return 1.0 if scale is None else float(torch.tensor(float(scale), dtype=embeddings.weight.dtype))


def _activation_of_experts(holder: Any, is_gated: bool) -> Activation | None:
    """Return the activation of a layer's experts; None for the model's. Raises UndescribedModelError."""
    if not isinstance(getattr(holder, "fc1_latent_proj", nn.Identity()), nn.Identity):
        raise UndescribedModelError("its experts work on latents")
    experts = holder.experts
    declared = experts.rest if isinstance(experts, ExpertsModule) else experts
    if not isinstance(experts, ExpertsModule) and not fused_experts(experts, by_kernel=False):
        raise UndescribedModelError("its experts are not one tensor")
    if declared.has_gate == is_gated and (declared.is_concatenated or not is_gated):
        return None
    own = gate_of(declared) if declared.has_gate and is_gated else None
    if own is None:
        raise UndescribedModelError("its experts have other gates")
    return own


def _tensor(module: Any, path: str) -> Tensor | None:
    """Return the tensor at this path, or None."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module if isinstance(module, Tensor) else None


def _unweighted(module: Any, epsilon: float) -> Norm | None:
    """Return the norm of an attention module's values, which has no weights, or None."""
    if getattr(module, "v_norm", None) is None:
        return None
    weight = module.q_norm.weight
    return Norm(torch.ones_like(weight), epsilon, NormKind.EXACT)


def _unless_ones(factors: Tensor) -> Tensor | None:
    return None if bool((factors == 1).all()) else factors


def _window(attention: Any) -> int:
    """Return an attention module's sliding window, or 0 without one."""
    reads_config = type(attention).__name__ in _READ_WINDOW_FROM_CONFIG
    holder = attention.config if reads_config else attention
    return getattr(holder, "sliding_window", None) or 0


def _group_size(norm: Any) -> int:
    """Return the group size of a state space's norm, or 0 without a norm."""
    if not hasattr(norm, "weight"):
        return 0
    return getattr(norm, "group_size", None) or len(norm.weight) // getattr(norm, "n_groups", 1)
