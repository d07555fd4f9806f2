"""The head as the native decoder runs it on the CPU: a whole draft in one call."""

from __future__ import annotations

import ctypes

from torch import Tensor, nn

from engine.batch.runner import Fill, ForwardOutput, Step
from engine.devices.cpu.attention.backend import CpuBackend
from engine.devices.cpu.decoder.description import ROPE_TYPES, num_weights
from engine.devices.cpu.decoder.forward import NativeDecoder
from engine.devices.cpu.decoder.native_model import NativeModel
from engine.devices.cpu.decoder.structs import EntryArgs, LayerArgs, ModelArgs, WeightsArgs
from engine.linear.packed_quantized import PackedQuantizedLinear
from speculation.eagle.head import Head


def unfit_head(head: Head) -> str | None:
    """Why the native decoder can't run the head; None if it can."""
    if head.shape.hidden_act not in ("silu", "swish"):
        return f"its activation is {head.shape.hidden_act}"
    if head.rotary.rope_type not in ROPE_TYPES:
        return f"its rotary embedding is of type {head.rotary.rope_type}"
    return None


class NativeHead(NativeDecoder):
    """Runs what `speculation.eagle.paged.HeadForward` runs. The weights are copied.

    Raises BuildError where the kernel cannot be built.
    """

    def __init__(
        self,
        head: Head,
        embedding: Tensor,
        lm_head: nn.Linear | PackedQuantizedLinear,
        draft_ids: Tensor | None,
        backend: CpuBackend,
    ) -> None:
        """`embedding` [vocab_size, hidden_size]; `lm_head` has `draft_vocab_size` outputs; `draft_ids` as in
        `speculation.eagle.weights.LoadedHead`.
        """
        description = _HeadDescription(head, embedding, lm_head, draft_ids)
        super().__init__(description, backend)
        self.mixes = description.mixes
        """Whether `draft` takes the target's hidden states as they are, [rows, feature_size]."""

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        assert step.hidden is not None
        return ForwardOutput(*self._forward(step))


class _HeadDescription(NativeModel):
    def __init__(
        self,
        head: Head,
        embedding: Tensor,
        lm_head: nn.Linear | PackedQuantizedLinear,
        draft_ids: Tensor | None,
    ) -> None:
        super().__init__(embedding.dtype)
        shape, layer = head.shape, head.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self._layer = LayerArgs(
            mlp_norm=self.keep(layer.post_attention_layernorm.weight),
            qkv=self.weights(attention.q_proj, attention.k_proj, attention.v_proj),
            output=self.weights(attention.o_proj),
            gate_up=self.weights(mlp.gate_proj, mlp.up_proj),
            down=self.weights(mlp.down_proj),
            window=shape.sliding_window or 0,
        )
        self._draft_ids = draft_ids
        self._entry = EntryArgs(
            normed_goes_on=shape.norm_before_residual,
            feeds_normed=shape.norm_output,
            token_ids=None if draft_ids is None else draft_ids.data_ptr(),
        )
        if not shape.is_eagle3:
            assert head.fc is not None
            self._entry.joint = self.weights(head.fc)
        else:
            self._entry.token_norm = self.keep(layer.input_layernorm.weight)
            self._entry.hidden_norm = self.keep(layer.hidden_norm.weight)
        self.mixes = (
            shape.is_eagle3 and head.fc is not None and head.input_norm is None and head.fc_norm is None
        )
        """Whether what `Head.combine` does is one product."""
        if self.mixes:
            self._entry.mixing = self.weights(head.fc)
        self.model = ModelArgs(
            layers=ctypes.addressof(self._layer),
            num_layers=1,
            hidden=shape.hidden_size,
            num_heads=shape.num_heads,
            head_dim=shape.head_dim,
            vocab=lm_head.out_features,
            products=num_weights(head) + num_weights(lm_head),
            embeddings=self.keep(embedding),
            final_norm=self.keep(head.norm.weight if shape.is_eagle3 else None),
            head=self._lm_head(lm_head, shape.logit_scale),
            **self.rotation(head.rotary, shape.max_positions),
            norm_epsilon=shape.rms_norm_eps,
            attention_scale=shape.head_dim**-0.5,
            entry=ctypes.addressof(self._entry),
        )

    def _lm_head(self, linear: nn.Linear | PackedQuantizedLinear, scale: float) -> WeightsArgs:
        bias = None if linear.bias is None else linear.bias * scale
        if isinstance(linear, PackedQuantizedLinear):
            return self.keep_quantized(linear.packed.scaled(scale), bias)
        return self.matrix(linear.weight * scale, bias)
