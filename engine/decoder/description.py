"""A Transformers model as the native decoder reads it: packed weights and tables, and where they lie."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.linear.packed import pack

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
    return None


class KeptTensors:
    """Tensors as the C++ side reads them, which live as long as this object."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def keep(self, tensor: Tensor | None) -> int:
        """The address of the tensor's values in bfloat16; 0 for none."""
        if tensor is None:
            return 0
        values = tensor.detach().to(torch.bfloat16).contiguous()
        self._kept.append(values)
        return values.data_ptr()

    def weights(self, *linears: nn.Linear) -> bytes:
        """Linear layers of one input, as one product."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return self.matrix(
            torch.cat([linear.weight for linear in linears]), torch.cat(biases) if biases else None
        )

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> bytes:
        return struct.pack(
            "=2Q2q", self.keep(pack(weight.detach())), self.keep(bias), weight.shape[1], len(weight)
        )

    def table(self, rotary: Any, positions: int) -> bytes:
        """Cosines and sines of a Transformers rotary embedding at so many positions."""
        with torch.inference_mode():
            probe = torch.zeros(1, dtype=torch.bfloat16)
            cosines, sines = rotary(probe, torch.arange(positions).unsqueeze(0))
        return struct.pack("=2Q", self.keep(cosines[0]), self.keep(sines[0]))


class Description(KeptTensors):
    """The C++ side's `Model` and `Layer` structs in memory, and the tensors that they point to.

    For a bfloat16 model on the CPU for which `unfit` finds nothing. `positions` are as many as its longest
    sequence has.
    """

    entry = b""

    def __init__(self, model: PreTrainedModel, positions: int) -> None:
        super().__init__()
        config, decoder = model.config, model.model
        attention = decoder.layers[0].self_attn
        self.vocab_size = model.lm_head.out_features
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = attention.head_dim
        self.attention_scale = float(attention.scaling)
        self.layers = b"".join(self._layer(layer) for layer in decoder.layers)
        self.num_layers = len(decoder.layers)
        self.hidden_size = config.hidden_size
        self.norm_epsilon = config.rms_norm_eps
        self.num_products = (
            sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
        )
        self.tables = struct.pack(
            "=2Q", self.keep(decoder.embed_tokens.weight), self.keep(decoder.norm.weight)
        )
        self.head = self.weights(model.lm_head)
        self.rotation = self.table(decoder.rotary_emb, positions)

    def _layer(self, layer: Any) -> bytes:
        attention, mlp = layer.self_attn, layer.mlp
        return (
            struct.pack(
                "=4Q",
                self.keep(layer.input_layernorm.weight),
                self.keep(getattr(getattr(attention, "q_norm", None), "weight", None)),
                self.keep(getattr(getattr(attention, "k_norm", None), "weight", None)),
                self.keep(layer.post_attention_layernorm.weight),
            )
            + self.weights(attention.q_proj, attention.k_proj, attention.v_proj)
            + self.weights(attention.o_proj)
            + self.weights(mlp.gate_proj, mlp.up_proj)
            + self.weights(mlp.down_proj)
            + struct.pack("=q", _window(attention))
        )


def _window(attention: Any) -> int:
    """Mistral's layers read theirs from the configuration; 0 for none."""
    holder = attention.config if type(attention).__name__ == "MistralAttention" else attention
    return getattr(holder, "sliding_window", None) or 0
