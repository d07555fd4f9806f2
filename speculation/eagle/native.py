"""The head as the native decoder runs it, for bfloat16 on the CPU: a whole draft in one call."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from engine.attention.cpu_kernel.backend import CpuBackend
from engine.decoder.description import ROPE_TYPES, KeptTensors
from engine.decoder.forward import NativeDecoder
from engine.forward import ForwardOutput
from engine.rows import RowArrays
from speculation.eagle.head import Head

_NO_WEIGHTS = struct.pack("=2Q2q", 0, 0, 0, 0)


def unfit(head: Head) -> str | None:
    """Why the native decoder can't run the head; None if it can."""
    if head.shape.hidden_act not in ("silu", "swish"):
        return f"its activation is {head.shape.hidden_act}"
    if head.rotary.rope_type not in ROPE_TYPES:
        return f"its rotary embedding is of type {head.rotary.rope_type}"
    return None


class NativeHead(NativeDecoder):
    """For `Runner`, as `speculation.eagle.paged.HeadForward`. The weights are copied.

    Raises BuildError where the kernel cannot be built.
    """

    def __init__(
        self, head: Head, embedding: Tensor, lm_head: Tensor, draft_ids: Tensor | None, backend: CpuBackend
    ) -> None:
        """`embedding` [vocab_size, hidden_size], `lm_head` [draft_vocab_size, hidden_size]; `draft_ids` as in
        `speculation.eagle.weights.LoadedHead`.
        """
        description = _HeadDescription(head, embedding, lm_head, draft_ids)
        super().__init__(description, backend)
        self.mixes = description.mixing != _NO_WEIGHTS
        """Whether `draft` takes the target's hidden states as they are, [rows, feature_size]."""
        self.hidden = torch.zeros((0, head.shape.hidden_size), dtype=torch.bfloat16)

    def __call__(self, token_ids: Tensor, positions: Tensor, logit_rows: list[int]) -> ForwardOutput:
        """`hidden` of the output has the rows of the logits, and no others."""
        return ForwardOutput(*self._forward((token_ids, positions), logit_rows, before=self.hidden))

    def run(self, batch: RowArrays, logit_rows: list[int], *, wants_hidden: bool) -> ForwardOutput:
        return ForwardOutput(*self._forward(batch, logit_rows, before=self.hidden))

    def every_row(self, token_ids: Tensor, places: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        every = list(range(len(token_ids)))
        return self._forward((token_ids, places), every, before=hidden)


class _HeadDescription(KeptTensors):
    """Implements `engine.decoder.forward.Described`."""

    def __init__(self, head: Head, embedding: Tensor, lm_head: Tensor, draft_ids: Tensor | None) -> None:
        super().__init__()
        shape, layer = head.shape, head.midlayer
        attention, mlp = layer.self_attn, layer.mlp
        self.num_layers = 1
        self.hidden_size = shape.hidden_size
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.vocab_size = len(lm_head)
        self.num_products = sum(p.numel() for p in head.parameters()) + lm_head.numel()
        self.norm_epsilon = shape.rms_norm_eps
        self.attention_scale = shape.head_dim**-0.5
        self.layers = (
            struct.pack("=4Q", 0, 0, 0, self.keep(layer.post_attention_layernorm.weight))
            + self.weights(attention.q_proj, attention.k_proj, attention.v_proj)
            + self.weights(attention.o_proj)
            + self.weights(mlp.gate_proj, mlp.up_proj)
            + self.weights(mlp.down_proj)
            + struct.pack("=q", shape.sliding_window or 0)
        )
        final_norm = head.norm.weight if shape.is_eagle3 else None
        self.tables = struct.pack("=2Q", self.keep(embedding), self.keep(final_norm))
        self.head = self.matrix(lm_head * shape.logit_scale)
        self.rotation = self.table(head.rotary, shape.max_positions)
        if shape.is_eagle3:
            norms = self.keep(layer.input_layernorm.weight), self.keep(layer.hidden_norm.weight)
            joint = _NO_WEIGHTS
        else:
            assert head.fc is not None
            norms, joint = (0, 0), self.weights(head.fc)
        self.mixing = self._mixing(head)
        flags = struct.pack("=2q", shape.norm_before_residual, shape.norm_output)
        self._draft_ids = draft_ids
        ids = struct.pack("=Q", 0 if draft_ids is None else draft_ids.data_ptr())
        self.entry = struct.pack("=2Q", *norms) + joint + self.mixing + flags + ids

    def _mixing(self, head: Head) -> bytes:
        """What `Head.combine` does, where that is one product."""
        if (
            head.fc is None
            or not head.shape.is_eagle3
            or head.input_norm is not None
            or head.fc_norm is not None
        ):
            return _NO_WEIGHTS
        return self.weights(head.fc)
