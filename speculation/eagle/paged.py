"""The head over packed rows: its attention reads and writes the pool's draft segment."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.attention.transformers_hook import paged_attention
from engine.forward import ForwardOutput, RowsForward
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
        query = head.query(joined, positions)
        key, value = head.key_value(joined, positions)
        attended = paged_attention(query, key, value, 0, shape.head_dim**-0.5, shape.sliding_window or 0, 0.0)
        scored, fed_back = head.normed(head.leave(attended[wanted], residual[wanted]))
        return self.lm_head(scored) * shape.logit_scale, fed_back

    def key_value(self, token_ids: Tensor, places: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' KV alone, from the target's `features`: with one layer it needs no attention."""
        hidden = self.head.combine(features)
        joined, _ = self.head.enter(self.embed_tokens(token_ids), hidden)
        return self.head.key_value(joined, places - 1)


class PagedForward(RowsForward):
    """For `Runner`. `hidden` [rows, hidden_size] belongs to the coming run's rows, padding left out."""

    def __init__(self, head: PagedHead, device: torch.device, mode: str, packed: bool) -> None:
        super().__init__(device, mode, packed)
        self._head = head
        self.hidden = torch.zeros(
            (0, head.head.shape.hidden_size), dtype=next(head.parameters()).dtype, device=device
        )

    def __call__(self, token_ids: Tensor, positions: Tensor, logit_rows: list[int]) -> ForwardOutput:
        """`hidden` of the output has the rows of the logits, and no others."""
        hidden = pad(self.hidden, (0, 0, 0, len(token_ids) - len(self.hidden)))
        logits, fed_back = self._run(token_ids, positions, hidden, self._index(logit_rows))
        assert fed_back is not None
        count = len(logit_rows)
        return ForwardOutput(logits[:count], fed_back[:count])

    def _compute(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._head(*inputs)


class KVWriter:
    """Writes draft KV of tokens whose hidden states before them are known, straight into the pool."""

    def __init__(self, head: PagedHead, segment: Tensor) -> None:
        """`segment`: [num_blocks, 1, 2, block_size, num_kv_heads, head_dim]."""
        self._head = head
        self._segment = segment

    def write(self, token_ids: Tensor, places: Tensor, slots: Tensor, features: Tensor) -> None:
        """For rows [n]: `slots` are block id * block_size + offset."""
        key, value = self._head.key_value(token_ids, places, features)
        size = self._segment.shape[3]
        blocks, offsets = slots // size, slots % size
        self._segment[blocks, 0, 0, offsets] = key
        self._segment[blocks, 0, 1, offsets] = value
