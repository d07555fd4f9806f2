"""Decoder layers that a checkpoint has in addition to its model's, such as an MTP head's.

They become a model of the target's own class with only these layers, the target's embedding and, unless they
bring an LM head, the target's LM head. So the target's code for loading, rounding and running serves them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.devices.cuda.tiles import tile_on_gpu
from engine.devices.loaded_model import LoadedModel
from engine.devices.torch import transformers_hook
from engine.devices.torch.latent_attention import absorb
from engine.light_imports import load_kernels
from engine.linear.experts import join_experts, split_experts
from engine.linear.packed import kernel_fault
from engine.linear.packed_quantized import pack_quantized_linears
from engine.load.probe import probe
from engine.load.quantized_checkpoint import load_tensors
from engine.load.rounding import round_layers
from engine.quantization.weight import CodeFormat, placeholder

_FINAL_NORMS = "norm", "norm_f"
"""The names of the decoder's final norm in different models."""


class Entrance(nn.Module):
    """The parts that make a layer's input from a token's embedding and the previous hidden state."""

    def __init__(self, norm: nn.Module, hidden_size: int, *, bias: bool) -> None:
        super().__init__()
        self.token_norm, self.hidden_norm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.joint = nn.Linear(2 * hidden_size, hidden_size, bias=bias)

    def forward(self, embeddings: Tensor, before: Tensor) -> Tensor:
        """Return [rows, hidden_size] from two tensors of this shape."""
        both = torch.cat([self.token_norm(embeddings), self.hidden_norm(before)], dim=-1)
        joined: Tensor = self.joint(both)
        return joined


def load_extra_layers(
    target: LoadedModel,
    layer_types: Sequence[str],
    tensors: Mapping[str, Tensor],
    method: Mapping[str, Any] | None,
    format: CodeFormat | None,
) -> LoadedModel:
    """Load layers of these types, with an Entrance as `entry`, between the target's embedding and an LM head.

    `tensors` have the prefixes `layers.0.` and so on, `entry.` and, optionally, `final_norm.` and `lm_head.`.
    `method` is their `quantization_config`; `format` rounds linear layers. Raises UnsupportedModelError that
    names a tensor, or ValueError if the format fits no layer.
    """
    own_lm_head = "lm_head.weight" in tensors
    load_kernels()
    with torch.device("meta"):
        empty = make_layers(
            target.model,
            layer_types,
            target.dtype,
            has_experts=any(".experts." in name for name in tensors),
            final_norm="final_norm.weight" in tensors,
            bias="entry.joint.bias" in tensors,
            own_lm_head=own_lm_head,
        )
    tensors = {_name_in(empty, name, own_lm_head): tensor for name, tensor in tensors.items()}
    tables = [empty.get_input_embeddings(), *([] if own_lm_head else [empty.get_output_embeddings()])]
    shared = {id(module.weight) for module in tables}
    tensors |= {name: placeholder(each) for name, each in empty.named_parameters() if id(each) in shared}
    has_kernel = kernel_fault(target.device, target.dtype) is None
    model = load_tensors(empty, tensors, method, target.device, keeps_experts=has_kernel)
    model.set_input_embeddings(nn.Identity())
    if not own_lm_head:
        model.set_output_embeddings(nn.Identity())
    if format is not None:
        if has_kernel:
            split_experts(model)
        round_layers(model, format)
    model.to(target.device)
    model.set_input_embeddings(target.model.get_input_embeddings())
    if not own_lm_head:
        model.set_output_embeddings(target.model.get_output_embeddings())
    if not target.expansion:
        absorb(model)
    if has_kernel:
        pack_quantized_linears(model)
        join_experts(model)
    elif target.device.type == "cuda":
        tile_on_gpu(model, target.device, target.dtype)
    kept = probe(model, target.dtype, len(layer_types))
    head = replace(target, model=model, kv_group=kept.kv, share=None)
    return replace(head, description=None, recurrent=None, adapters=None)


def make_layers(
    target: PreTrainedModel,
    layer_types: Sequence[str],
    dtype: torch.dtype,
    *,
    has_experts: bool = False,
    final_norm: bool = True,
    bias: bool = False,
    own_lm_head: bool = False,
) -> PreTrainedModel:
    """Make a model of the target's class that has only these layers, and an Entrance as `entry`."""
    kind = type(target)

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        decoder, text = self.get_decoder(), config.get_text_config(decoder=True)
        norm = _norm_name(decoder)
        self.entry = Entrance(getattr(decoder, norm), text.hidden_size, bias=bias)
        if own_lm_head:
            lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
            self.set_output_embeddings(nn.Sequential(getattr(decoder, norm), lm_head))
        if own_lm_head or not final_norm:
            setattr(decoder, norm, nn.Identity())

    config = layers_config(target.config, layer_types, has_experts=has_experts)
    with_entry: Any = type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
    made: PreTrainedModel = with_entry._from_config(
        config, dtype=dtype, attn_implementation=transformers_hook.NAME
    )
    return made


def layers_config(config: Any, layer_types: Sequence[str], *, has_experts: bool) -> Any:
    """Return a copy of the configuration with layers of these types, all or none of them with experts."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    count = len(layer_types)
    fields = {
        "num_hidden_layers": count,
        "layer_types": [*layer_types],
        "mlp_layer_types": ["sparse" if has_experts else "dense"] * count,
        "first_k_dense_replace": 0 if has_experts else count,
        "moe_layer_start_index": 0 if has_experts else count,
        "moe_layer_end_index": count - 1,
        "mlp_only_layers": [] if has_experts else [*range(count)],
    }
    if getattr(text, "is_heterogeneous", False):  # fields that differ between the target's layer types
        per_layer = text.to_dict()["per_layer_config"]
        by_type = {text.layer_types[int(number)]: changed for number, changed in per_layer.items()}
        fields["per_layer_config"] = {
            number: by_type[kind] for number, kind in enumerate(layer_types) if kind in by_type
        }
    for name, value in fields.items():
        if getattr(text, name, None) is not None:
            setattr(text, name, value)
    return config


def _norm_name(decoder: nn.Module) -> str:
    return next(name for name in _FINAL_NORMS if hasattr(decoder, name))


def _name_in(model: PreTrainedModel, name: str, own_lm_head: bool) -> str:
    part, _, rest = name.partition(".")
    if part == "entry":
        return name
    if own_lm_head and part in ("final_norm", "lm_head"):
        return f"lm_head.{int(part == 'lm_head')}.{rest}"
    decoder = model.get_decoder()
    path = next(path for path, module in model.named_modules() if module is decoder)
    return f"{path}.{_norm_name(decoder)}.{rest}" if part == "final_norm" else f"{path}.{name}"


def final_norm(decoder: nn.Module) -> nn.Module:
    return decoder.get_submodule(_norm_name(decoder))
