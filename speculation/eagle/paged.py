"""The head over packed rows: its attention reads and writes the pool's draft segment."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.batch.runner import Fill, ForwardOutput, Step
from engine.batch.step_inputs import StepInputs
from engine.devices.torch import transformers_hook
from engine.devices.torch.forward import RowsForward
from engine.kv.attention import AttentionBackend
from speculation.eagle.head import Head


class PagedHead(nn.Module):
    """Row i is the pair of token i and the hidden state before it. Its key and value go to token i's place,
    and its position is that of the hidden state, one less: so a block's draft KV depends on no later token,
    and the head sees the positions that it was trained on.
    """

    def __init__(self, head: Head, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.embed_tokens = embed_tokens
        self.lm_head = lm_head

    def forward(
        self, token_ids: Tensor, places: Tensor, hidden: Tensor, wanted: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`hidden` [rows, hidden_size], of the target (`Head.combine`) or the head's own. For the `wanted`
        rows: logits [wanted, draft_vocab_size], and the hidden states for the rows after them.
        """
        head, shape = self.head, self.head.shape
        positions = (places - 1).clamp(min=0)
        joined, residual = head.enter(self.embed_tokens(token_ids), hidden)
        query, key, value = head.project(joined, positions)
        attended = transformers_hook.paged_attention(
            query, key, value, 0, shape.head_dim**-0.5, shape.sliding_window or 0, 0.0
        )
        scored, fed_back = head.normed(head.leave(attended[wanted], residual[wanted]))
        return self.lm_head(scored) * shape.logit_scale, fed_back


class HeadForward(RowsForward):
    """A head by torch's operators."""

    def __init__(
        self,
        head: PagedHead,
        backend: AttentionBackend,
        device: torch.device,
        mode: str,
        *,
        products: str,
        packed: bool,
    ) -> None:
        super().__init__(backend, device, mode, products=products, packed=packed)
        self._head = head

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        logits, hidden = super().run(step, fill)
        return ForwardOutput(logits, None if hidden is None else hidden[: len(step.logit_rows)])

    def _call(self, inputs: StepInputs, before: Tensor | None) -> ForwardOutput:
        token_ids, positions, logit_rows = inputs[:3]
        if before is None:  # padding alone
            weight = next(self._head.parameters())
            before = weight.new_zeros((0, self._head.head.shape.hidden_size))
        before = pad(before, (0, 0, 0, len(token_ids) - len(before)))
        return ForwardOutput(*self._run(token_ids, positions, before, logit_rows))

    def _compute(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._head(*inputs)
