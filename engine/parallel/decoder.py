"""A rank's share of a model that the native decoder runs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from engine.decoder.description import NativeModel
from engine.decoder.structs import GatherFunction, LayerArgs, ModelArgs, WeightsArgs
from engine.errors import UnsupportedModelError
from engine.linear.packed import packed_rows
from engine.parallel.group import LostRankError, Ranks


class DescriptionShare(NativeModel):
    """It shares the whole one's memory, but for packed weights whose own outputs do not lie together there in
    whole panels: queries beside keys and values, and the gate beside what it opens.
    """

    def __init__(self, whole: NativeModel, ranks: Ranks) -> None:
        super().__init__()
        self._whole = whole  # which owns most of the memory
        self._ranks = ranks
        self.lost: LostRankError | None = None
        """What went wrong in a forward, whose results then mean nothing."""
        args = whole.model
        hidden, queries = args.hidden, args.num_heads * args.head_dim
        self.layers = (LayerArgs * args.num_layers)(
            *(self._layer(layer, queries, hidden) for layer in whole.layers)
        )
        self._gather = GatherFunction(self._on_gather)
        self.model = ModelArgs.from_buffer_copy(args)
        self.model.layers = ctypes.addressof(self.layers)
        self.model.num_heads = args.num_heads // ranks.size
        self.model.products = args.products // ranks.size
        if args.vocab % ranks.size == 0:  # else each rank computes all logits
            self.model.head = self._rows(args.head, args.vocab)
        self.model.gather = ctypes.cast(self._gather, ctypes.c_void_p)

    def _layer(self, whole: LayerArgs, queries: int, hidden: int) -> LayerArgs:
        keys = (whole.qkv.outputs - queries) // 2
        layer = LayerArgs.from_buffer_copy(whole)
        layer.qkv = self._rows(whole.qkv, queries, keys, keys)
        layer.output = self._rows(whole.output, hidden)
        layer.gate_up = self._rows(whole.gate_up, whole.down.inputs, whole.down.inputs)
        layer.down = self._rows(whole.down, hidden)
        return layer

    def _rows(self, whole: WeightsArgs, *sizes: int) -> WeightsArgs:
        """This rank's part of outputs of these sizes, one after the other. Raises UnsupportedModelError."""
        rows, start = [], 0
        for size in sizes:
            if size % self._ranks.size:
                ranks = f"{self._ranks.size} tensor-parallel ranks"
                raise UnsupportedModelError(f"{size} outputs of a layer cannot be divided among {ranks}")
            own = self._ranks.own(size)
            rows.append(range(start + own.start, start + own.stop))
            start += size
        weight = packed_rows(self._whole.kept(whole.values), rows)
        bias = None
        if whole.bias is not None:
            bias = torch.cat([self._whole.kept(whole.bias)[each.start : each.stop] for each in rows])
        return WeightsArgs(self.keep(weight), self.keep(bias), whole.inputs, sum(map(len, rows)))

    def _on_gather(self, part: int, whole: int, rows: int, width: int) -> None:
        """As `Ranks.gather`, of `rows` with `width` values here each."""
        if self.lost is not None:
            return
        try:
            gathered = self._ranks.gather(_values(part, rows, width))
        except LostRankError as error:
            self.lost = error  # the native code that called can't take an exception
        else:
            _values(whole, rows, width * self._ranks.size).copy_(gathered)


def _values(address: int, rows: int, width: int) -> Tensor:
    memory = (ctypes.c_uint16 * (rows * width)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(rows, width)
