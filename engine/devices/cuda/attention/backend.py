"""The host's side of the Triton attention kernels: launches, without reads from the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from engine.devices.cuda.attention import tiles
from engine.devices.cuda.attention.attend import attend
from engine.devices.cuda.attention.plan import plan
from engine.devices.cuda.attention.softmax import merge
from engine.devices.cuda.attention.write import write
from engine.kv.attention import AttentionMetadata, AttentionOptions, CapturableBackend, LayerKv, check_rows
from engine.kv.row_codes import KvRows
from engine.triton_support import ceil_div, power_of_two, triton_fault
from protocol.handoff import ROW_QUANTIZATIONS

LOG2E = 1.4426950408889634
MULTIPLIED = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""The type that the matrix units multiply, by the dtype of rows."""

LARGEST_DIM = 512
"""The largest size of values and coded keys. Uncoded keys may have as many more, as in latent attention."""

PARTS_BYTES = 256 * 1024**2
"""The most memory for partial results of splits. Tiles whose splits do not fit are joined by one program."""

_TREE_KEYS = 64
"""The most keys of a tree."""

_PLANNED_TOGETHER, _MERGED_TOGETHER = 64, 16
_PROGRAMS = 4
"""Programs per multiprocessor: as many as it runs at a time."""

_MOST_MEMBERS = 16
"""The most heads of a group in a tile. A larger group takes several tiles."""


class _Plan(NamedTuple):
    sequence: Tensor
    first_row: Tensor
    full_start: Tensor


class PoolLayer:
    """A layer's part of the pool, in the form that the kernels take."""

    def __init__(self, kv: LayerKv, rows: KvRows) -> None:
        _, self.block_size, self.kv_heads, key_dim = kv.keys.shape
        self.dims = key_dim, value_dim = key_dim, kv.values.shape[3]
        tail = 0 if rows.coded else min(max(0, key_dim - LARGEST_DIM), LARGEST_DIM)
        if max(key_dim - tail, value_dim) > LARGEST_DIM:
            raise ValueError(f"head_dim {max(self.dims)}: the triton kernel takes at most {LARGEST_DIM}")
        padded = power_of_two(key_dim - tail), power_of_two(tail) if tail else 0, power_of_two(value_dim)
        self.is_fp8 = rows.quantization == ROW_QUANTIZATIONS["fp8"]
        self._constants = *self.dims, *padded, kv.values_in_keys, self.block_size, self.is_fp8
        self.strides = [stride for side in kv.sides for stride in side.values.stride()[:3]]
        self.pool = kv.keys, kv.key_scales, kv.values, kv.value_scales

    def constants(self, heads: int) -> tiles.LayerConstants:
        return tiles.LayerConstants(heads, heads // self.kv_heads, *self._constants)


class TritonBackend(CapturableBackend):
    """A backend that reads the blocks in place. A row's result has the same bits in any batch, and both as a
    decode row and in a prefill chunk.
    """

    name = "triton"
    layers: list[PoolLayer]

    @classmethod
    def fault(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        if dtype not in MULTIPLIED:
            return f"the triton kernel does not take {dtype}"
        return triton_fault(device)

    def __init__(self, layers: Sequence[LayerKv], rows: KvRows | None = None) -> None:
        first = layers[0].keys
        self._rows = rows or KvRows(first.dtype)
        if self._rows.dtype not in MULTIPLIED or not layers[0].fits(self._rows):
            raise ValueError(f"layers of {first.dtype} are not rows of {self._rows} that the kernel reads")
        self.block_size = first.shape[1]
        self.layers = [PoolLayer(layer, self._rows) for layer in layers]
        self._programs = _most_programs(first.device)
        self._metadata: AttentionMetadata | None = None
        self._plans: dict[tuple[bool, int, int, int], _Plan] = {}

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata
        self._plans.clear()

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if self._metadata is None:
            raise RuntimeError("begin_step must come before forward")
        of = self.layers[layer]
        query, key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (query, key, value))
        dims = of.kv_heads, *of.dims
        check_rows(query, key, value, len(self._metadata.slot_mapping), dims, self._rows)
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        if not len(query):
            return out
        constants = of.constants(query.shape[1])
        write[(len(key), of.kv_heads)](
            key,
            value,
            *of.pool,
            out,
            self._metadata.slot_mapping,
            *key.stride()[:2],
            *value.stride()[:2],
            *of.strides,
            LAYER=constants._replace(key_padded=power_of_two(of.dims[0])),
            num_warps=1,
            enable_fp_fusion=False,  # fused, codes would round differently from other devices
        )
        self._attend_to_all(of, query, out, options)
        return out

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        of = self.layers[layer]
        out = query.new_empty((*query.shape[:2], of.dims[1]))
        self._attend_to_all(of, query, out, options)
        return out

    def _attend_to_all(self, of: PoolLayer, query: Tensor, out: Tensor, options: AttentionOptions) -> None:
        assert self._metadata is not None
        for chunk in (False, True):
            if not chunk or self._metadata.max_query_len >= tiles.CHUNK:
                self._attend(chunk, of, query, out, options)

    def _attend(
        self, chunk: bool, of: PoolLayer, query: Tensor, out: Tensor, options: AttentionOptions
    ) -> None:
        step, (scale, window, softcap, sinks) = self._metadata, options
        assert step is not None
        tile = tiles.tile_of(chunk, of.dims, query.dtype.itemsize, self._rows.coded)
        layer = of.constants(query.shape[1])
        members = min(_MOST_MEMBERS, 1 << (layer.group - 1).bit_length())
        tokens, heads = tile.rows // members, layer.heads
        count, longest = self._most_tiles(chunk, tokens, len(query))
        if not count:
            return
        tile_tokens = min(tokens, longest)
        listable = count * (_most_splits(step.max_context_len, window, tokens) - 1)
        room = PARTS_BYTES // (4 * tile_tokens * heads * (of.dims[1] + 1)) - count
        full = 0 if chunk else min(listable, max(0, room))
        planned = self._planned(chunk, tokens, count, longest, window, full)
        works = of.kv_heads * ceil_div(layer.group, members)
        constants = tiles.TileConstants(
            members,
            tokens,
            tile.keys,
            tiles.SPLIT,
            window > 0,
            step.visible is not None,
            bool(softcap),
            MULTIPLIED[query.dtype],
            joins=False,
        )

        def launch(joins: bool) -> tuple[Tensor, Tensor]:
            programs = min(self._programs, (count if joins else count + full) * works)
            kept = programs * 2 * tile.rows if joins else (count + full if full else 0) * tile_tokens * heads
            parts, masses = (
                torch.empty(kept * each, dtype=torch.float32, device=out.device) for each in (of.dims[1], 2)
            )
            attend[(programs,)](
                query,
                *of.pool,
                sinks,
                out,
                parts,
                masses,
                *planned,
                step.query_start,
                step.context_len,
                step.block_table,
                step.slot_mapping,
                step.first_key,
                step.visible,
                step.tree_start,
                count,
                tile_tokens,
                step.block_table.stride(0),
                window,
                int(chunk),
                *query.stride()[:2],
                *of.strides,
                scale / softcap if softcap else scale * LOG2E,
                (softcap or 1.0) * LOG2E,
                LAYER=layer,
                TILES=constants._replace(joins=joins),
                num_warps=tile.warps,
                num_stages=tile.stages,
                maxnreg=tile.registers,
                enable_fp_fusion=False,  # a fused product would round differently from one with a mask
            )
            return parts, masses

        if not chunk:
            parts = launch(joins=False)
            if full:
                merge[(min(self._programs, count * tile_tokens * heads),)](
                    *parts,
                    sinks,
                    out,
                    *planned,
                    step.query_start,
                    step.slot_mapping,
                    count,
                    tile_tokens,
                    HEADS=heads,
                    VALUE_DIM=layer.value_dim,
                    VALUE_PADDED=layer.value_padded,
                    TOGETHER=_MERGED_TOGETHER,
                    num_warps=2,
                    enable_fp_fusion=False,
                )
        if chunk or full < listable:
            launch(joins=True)

    def _most_tiles(self, chunk: bool, tokens: int, num_rows: int) -> tuple[int, int]:
        """Return the most tiles of `tokens` tokens, and the most rows of a sequence in them."""
        step = self._metadata
        assert step is not None
        longest = step.max_query_len if chunk else min(step.max_query_len, tiles.CHUNK - 1)
        owners = min(len(step.context_len), num_rows // (tiles.CHUNK if chunk else 1))
        return min(owners * ceil_div(longest, tokens), num_rows // tokens + owners), longest

    def _planned(
        self, chunk: bool, tokens: int, count: int, longest: int, window: int, most_full: int
    ) -> _Plan:
        """Return the step's tiles of `tokens` tokens, planned once for all layers of the same kind."""
        step, key = self._metadata, (chunk, tokens, window, most_full)
        assert step is not None
        if key in self._plans:
            return self._plans[key]
        sequences = len(step.context_len)
        lists = torch.empty(
            (3, ceil_div(count + 1, 4) * 4), dtype=torch.int32, device=step.query_start.device
        )
        plan[(1,)](
            step.query_start,
            step.context_len,
            step.first_key,
            step.tree_start,
            *lists,
            sequences,
            count,
            tiles.CHUNK if chunk else 1,
            longest,
            window,
            most_full,
            ROWS=tokens,
            SEQUENCES=power_of_two(sequences),
            TILES=_PLANNED_TOGETHER,
            SPLIT=tiles.SPLIT,
            WINDOWED=window > 0,
        )
        return self._plans.setdefault(key, _Plan(*lists))


def _most_splits(max_context_len: int, window: int, tokens: int) -> int:
    """Return the most splits that a tile's keys fall into. With a window these keys are at most the window
    before the tile's rows, or before an earlier start of their tree, and the rows themselves.
    """
    splits = ceil_div(max_context_len, tiles.SPLIT)
    if not window:
        return splits
    return min(splits, ceil_div(window + _TREE_KEYS + tokens, tiles.SPLIT) + 1)


def _most_programs(device: torch.device) -> int:
    """Return how many programs run at a time; a small number without a GPU."""
    count = 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count
    return _PROGRAMS * count
