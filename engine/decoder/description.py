"""A Transformers model as the native decoder reads it: packed weights and tables, and where they lie."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.decoder.structs import LayerArgs, ModelArgs, WeightsArgs
from engine.linear.packed import pack
from engine.linear.quantized import QuantizedLinear

MODELS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def unfit(model: PreTrainedModel) -> str | None:
    """Why the native decoder can't run the model; None if it can."""
    config = model.config
    name = type(model).__name__
    if name not in MODELS:
        return f"{name} is not among {', '.join(MODELS)}"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}"
    rope_type = model.model.rotary_emb.rope_type
    if rope_type not in ROPE_TYPES:
        return f"its rotary embedding is of type {rope_type}"
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        return "its layers are quantized"
    return None


class NativeModel:
    """A model as the C++ side reads it. What `model` points to lives as long as this object."""

    model: ModelArgs
    layers: ctypes.Array[LayerArgs]

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def keep(self, tensor: Tensor | None) -> int | None:
        """The address of the tensor's values in bfloat16."""
        if tensor is None:
            return None
        values = tensor.detach().to(torch.bfloat16).contiguous()
        self._kept.append(values)
        return values.data_ptr()

    def kept(self, address: int) -> Tensor:
        """What `keep` gave the address of."""
        return next(tensor for tensor in self._kept if tensor.data_ptr() == address)

    def weights(self, *linears: nn.Linear) -> WeightsArgs:
        """Linear layers of one input, as one product."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return self.matrix(
            torch.cat([linear.weight for linear in linears]), torch.cat(biases) if biases else None
        )

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> WeightsArgs:
        return WeightsArgs(self.keep(pack(weight.detach())), self.keep(bias), weight.shape[1], len(weight))

    def rotation(self, rotary: Any, positions: int) -> tuple[int | None, int | None]:
        """Cosines and sines of a Transformers rotary embedding at so many positions."""
        with torch.inference_mode():
            probe = torch.zeros(1, dtype=torch.bfloat16)
            cosines, sines = rotary(probe, torch.arange(positions).unsqueeze(0))
        return self.keep(cosines[0]), self.keep(sines[0])


class Description(NativeModel):
    """A bfloat16 model on the CPU for which `unfit` finds nothing, with at most so many `positions`.

    The model loses the weights of its layers, each as soon as it is packed.
    """

    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        super().__init__()
        config, decoder = model.config, model.model
        attention = decoder.layers[0].self_attn
        layers = [self._take(layer) for layer in decoder.layers]
        self.layers = (LayerArgs * len(layers))(*layers)
        embeddings = model.get_input_embeddings().weight
        cosines, sines = self.rotation(decoder.rotary_emb, positions)
        self.model = ModelArgs(
            layers=ctypes.addressof(self.layers),
            num_layers=len(layers),
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            head_dim=attention.head_dim,
            vocab=model.lm_head.out_features,
            products=sum(p.numel() for p in model.parameters()) - embeddings.numel(),
            embeddings=self.keep(embeddings),
            final_norm=self.keep(decoder.norm.weight),
            head=self.weights(model.lm_head),
            cosines=cosines,
            sines=sines,
            norm_epsilon=config.rms_norm_eps,
            attention_scale=float(attention.scaling),
        )

    def _take(self, layer: Any) -> LayerArgs:
        packed = self._layer(layer)
        layer.to("meta")
        return packed

    def _layer(self, layer: Any) -> LayerArgs:
        attention, mlp = layer.self_attn, layer.mlp
        return LayerArgs(
            input_norm=self.keep(layer.input_layernorm.weight),
            query_norm=self.keep(getattr(getattr(attention, "q_norm", None), "weight", None)),
            key_norm=self.keep(getattr(getattr(attention, "k_norm", None), "weight", None)),
            mlp_norm=self.keep(layer.post_attention_layernorm.weight),
            qkv=self.weights(attention.q_proj, attention.k_proj, attention.v_proj),
            output=self.weights(attention.o_proj),
            gate_up=self.weights(mlp.gate_proj, mlp.up_proj),
            down=self.weights(mlp.down_proj),
            window=_window(attention),
        )


def _window(attention: Any) -> int:
    """Mistral's layers read theirs from the configuration; 0 for none."""
    holder = attention.config if type(attention).__name__ == "MistralAttention" else attention
    return getattr(holder, "sliding_window", None) or 0
