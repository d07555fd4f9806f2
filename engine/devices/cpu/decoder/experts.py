"""A layer's experts as the native decoder reads them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from engine.devices.cpu.decoder.native_model import NativeModel
from engine.devices.cpu.decoder.structs import ExpertsArgs, ExpertWeightsArgs
from engine.linear.experts import Experts, fused_experts, pack_experts
from engine.linear.routed import RoutedLinear, RoutedQuantizedLinear
from engine.model.families import Routing


def unfit_experts(block: nn.Module, has_gate: bool) -> str | None:
    """Why the native decoder can't run a layer's experts; None if it can."""
    if not isinstance(getattr(block, "fc1_latent_proj", nn.Identity()), nn.Identity):
        return "its experts work on latents"
    experts: Any = block.experts
    declared = experts.rest if isinstance(experts, Experts) else experts
    if not isinstance(experts, Experts) and not fused_experts(experts, by_kernel=False):
        return "its experts are not one tensor"
    if declared.has_gate != has_gate or (has_gate and not declared.is_concatenated):
        return "its experts have other gates"
    return None


def experts_args(native: NativeModel, layer: nn.Module, routing: Routing) -> ExpertsArgs:
    """Of a layer with experts, which it packs if they are not packed yet. `native` keeps their memory."""
    pack_experts(layer)
    block: Any = layer.get_submodule(routing.block)
    router = getattr(block, routing.router)
    first, second = block.experts.first, block.experts.second
    args = ExpertsArgs(
        count=router.num_experts,
        chosen=router.top_k,
        score=routing.score,
        preferences=native.keep_floats(_tensor(block, routing.preferences)),
        groups=getattr(router, "num_group", 1),
        open_groups=getattr(router, "topk_group", 1),
        normalizes=getattr(router, "norm_topk_prob", True),
        least_sum=routing.least_sum,
        scaling=getattr(router, "routed_scaling_factor", 1.0),
        rounds=routing.rounds,
        first=_weights(native, first),
        second=_weights(native, second),
    )
    if routing.exact:
        args.exact_router = native.keep_floats(router.weight)
    else:
        args.router = native.matrix(router.weight)
    if routing.opener is not None:
        args.opener = native.weights(getattr(block, routing.opener))
    return args


def _tensor(module: Any, path: str | None) -> Tensor | None:
    """At this path, if there is one."""
    for name in () if path is None else path.split("."):
        module = getattr(module, name, None)
    return module if isinstance(module, Tensor) else None


def _weights(native: NativeModel, linear: RoutedLinear | RoutedQuantizedLinear) -> ExpertWeightsArgs:
    bias, outputs = native.keep(linear.bias), linear.out_features
    if isinstance(linear, RoutedLinear):
        values = native.hold(linear.weight)
        return ExpertWeightsArgs(values.data_ptr(), bias, inputs=2 * values.shape[2], outputs=outputs)
    linear.words, linear.scales = native.hold(linear.words), native.hold(linear.scales)
    linear.offsets, linear.inputs = (
        None if each is None else native.hold(each) for each in (linear.offsets, linear.inputs)
    )
    first = linear.first()
    words, scales = linear.words[0, 0].numel(), linear.scales[0, 0].numel()
    return ExpertWeightsArgs(
        None, None, native.keep_experts(first), words, scales, first.in_features, outputs
    )
