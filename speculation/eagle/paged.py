"""The head over packed rows: its attention reads and writes the pool's draft segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from engine.attention import transformers_hook
from engine.attention.interface import AttentionBackend, AttentionMetadata
from engine.forward import ForwardOutput, RowsForward
from engine.rows import SequenceRows, block_table
from engine.select_forward import PackedForward
from speculation.eagle.head import Head


class PagedHead(nn.Module):
    """Row i is the pair of token i and the hidden state before it. Its key and value go to token i's place,
    and its position is that of the hidden state, one less: so a block's draft KV depends on no later token,
    and the head sees the positions that it was trained on.
    """

    def __init__(self, head: Head, embed_tokens: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        head.fuse()
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

    def key_value(self, token_ids: Tensor, places: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The rows' KV alone: with one layer it needs no attention."""
        joined, _ = self.head.enter(self.embed_tokens(token_ids), hidden)
        _, key, value = self.head.project(joined, places - 1)
        return key, value


class AnyHead(PackedForward, Protocol):
    """What `Runner` runs. The hidden states of its output are for the rows after those whose logits were
    asked for.
    """

    def padded_rows(self, total_tokens: int) -> int: ...

    def every_row(self, token_ids: Tensor, places: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of all rows, which are padded."""
        ...


class HeadForward(RowsForward):
    """Implements `AnyHead` with torch's operators, compiled where that pays."""

    def __init__(
        self, head: PagedHead, device: torch.device, mode: str, *, products: str, packed: bool
    ) -> None:
        super().__init__(device, mode, products=products, packed=packed)
        self._head = head
        self._every: Tensor | None = None
        weight = next(head.parameters())
        self._no_rows = torch.zeros((0, head.head.shape.hidden_size), dtype=weight.dtype, device=device)

    def _call(
        self, token_ids: Tensor, positions: Tensor, logit_rows: list[int], before: Tensor | None
    ) -> ForwardOutput:
        hidden = self._no_rows if before is None else before  # None: padding alone
        hidden = pad(hidden, (0, 0, 0, len(token_ids) - len(hidden)))
        logits, fed_back = self._run(token_ids, positions, hidden, self._index(logit_rows))
        assert fed_back is not None
        count = len(logit_rows)
        return ForwardOutput(logits[:count], fed_back[:count])

    def every_row(self, token_ids: Tensor, places: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self._every is None or len(self._every) != len(token_ids):
            self._every = torch.arange(len(token_ids), device=self._device)
        logits, fed_back = self._run(token_ids, places, hidden, self._every)
        assert fed_back is not None
        return logits, fed_back

    def _compute(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._head(*inputs)


class Steps:
    """Runs a row of each sequence of a batch at one place after the other.

    What `Runner` prepares for each of its runs is prepared for all of them at once: a head is so small that
    it would be a good part of the time.
    """

    def __init__(
        self,
        forward: AnyHead,
        backend: AttentionBackend,
        first_rows: Sequence[SequenceRows],
        num_steps: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """`first_rows`: a row of each sequence, without its token."""
        count = len(first_rows)
        padded = forward.padded_rows(count)
        starts = np.array([rows.start for rows in first_rows])
        places = np.zeros((num_steps, padded), np.int64)
        places[:, :count] = starts + np.arange(num_steps)[:, None]
        table = block_table([rows.block_ids for rows in first_rows])
        slots = np.full((num_steps, padded), -1, np.int64)
        own = places[:, :count]
        slots[:, :count] = table[np.arange(count), own // block_size].astype(np.int64) * block_size
        slots[:, :count] += own % block_size

        def tensor(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        self._forward = forward
        self._backend = backend
        self._padding = padded - count
        self._places = tensor(places)
        self._slots = tensor(slots)
        self._context_lens = tensor((own + 1).astype(np.int32))
        self._longest = int(starts.max()) + 1
        self._query_start = tensor(np.arange(count + 1, dtype=np.int32))
        self._table = tensor(table)
        self._first_key = tensor(np.array([rows.first_key for rows in first_rows], np.int32))
        self._step = 0

    def pad(self, rows: Tensor) -> Tensor:
        """[sequences, ...] with padding rows."""
        return pad(rows, (0, 0) * (rows.ndim - 1) + (0, self._padding)) if self._padding else rows

    def run(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """One step, for padded rows: logits [rows, draft_vocab_size], hidden states [rows, hidden_size]."""
        step, self._step = self._step, self._step + 1
        metadata = AttentionMetadata(
            query_start=self._query_start,
            context_len=self._context_lens[step],
            block_table=self._table,
            slot_mapping=self._slots[step],
            max_query_len=1,
            max_context_len=self._longest + step,
            first_key=self._first_key,
        )
        self._backend.begin_step(metadata)
        transformers_hook.set_current_backend(self._backend)
        return self._forward.every_row(token_ids, self._places[step], hidden)


class KVWriter:
    """Writes draft KV of tokens whose hidden states before them are known, straight into the pool."""

    def __init__(self, head: PagedHead, layer: Tensor) -> None:
        """`layer`: [num_blocks, 2, block_size, num_kv_heads, head_dim]."""
        self._head = head
        self._layer = layer

    def write(self, batch: Sequence[SequenceRows], hidden: Tensor) -> None:
        """`hidden` [rows, hidden_size] are those before the batch's tokens (`Head.combine`)."""
        size, device = self._layer.shape[2], self._layer.device
        places = [np.arange(rows.start, rows.start + len(rows.token_ids)) for rows in batch]
        found = [
            np.array(rows.block_ids, np.int64)[span // size] for rows, span in zip(batch, places, strict=True)
        ]
        token_ids = np.array([token for rows in batch for token in rows.token_ids], np.int64)
        columns = torch.from_numpy(np.stack([token_ids, np.concatenate(places), np.concatenate(found)]))
        tokens, place, blocks = columns.to(device, non_blocking=True)
        key, value = self._head.key_value(tokens, place, hidden)
        self._layer[blocks, 0, place % size] = key
        self._layer[blocks, 1, place % size] = value
