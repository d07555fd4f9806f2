"""A rank's share of a model that the native decoder runs."""

from __future__ import annotations

import ctypes

import torch

from engine.devices.cpu.decoder.native_model import NativeModel
from engine.devices.cpu.decoder.structs import LayerArgs, ModelArgs, WeightsArgs
from engine.linear.packed import PANEL, packed_rows
from engine.parallel.group import Ranks
from engine.parallel.heads import Heads


class DescriptionShare(NativeModel):
    """It shares the whole one's memory, but for packed weights whose own outputs do not lie together there in
    whole panels: queries beside keys and values, and the gate beside what it opens.
    """

    def __init__(self, whole: NativeModel, heads: Heads, ranks: Ranks) -> None:
        super().__init__(whole.dtype)
        self._whole = whole  # which owns most of the memory
        self._ranks = ranks
        args = whole.model
        queries, keys = (range(own.start * args.head_dim, own.stop * args.head_dim) for own in heads)
        gated, hidden = self._own(whole.layers[0].down.inputs), self._own(args.hidden)
        own = (queries, keys, keys), (), (hidden,), (gated, gated), (hidden,), ()
        self.columns = {
            path: columns
            for paths in whole.paths
            for names, ranges in zip(paths, own, strict=True)
            for path, columns in zip(names, ranges, strict=False)
        }
        self.paths = whole.paths
        rows = queries, keys, hidden, gated
        self.layers = (LayerArgs * args.num_layers)(
            *(self._layer(each, args, *rows) for each in whole.layers)
        )
        self.model = ModelArgs.from_buffer_copy(args)
        self.model.layers = ctypes.addressof(self.layers)
        self.model.num_heads = len(heads.queries)
        self.model.products = args.products // ranks.size
        self.model.head = self._rows(args.head, self._own(args.vocab))
        self.model.ranks, self.model.gather = ranks.addresses

    def _layer(
        self, whole: LayerArgs, model: ModelArgs, queries: range, keys: range, hidden: range, gated: range
    ) -> LayerArgs:
        after_queries = model.num_heads * model.head_dim
        after_keys = (after_queries + whole.qkv.outputs) // 2
        layer = LayerArgs.from_buffer_copy(whole)
        layer.qkv = self._rows(whole.qkv, queries, _moved(keys, after_queries), _moved(keys, after_keys))
        layer.output = self._rows(whole.output, hidden)
        layer.gate_up = self._rows(whole.gate_up, gated, _moved(gated, whole.down.inputs))
        layer.down = self._rows(whole.down, hidden)
        return layer

    def _own(self, outputs: int) -> range:
        return self._ranks.own(outputs, PANEL)

    def _rows(self, whole: WeightsArgs, *rows: range) -> WeightsArgs:
        """These of the outputs."""
        if whole.quantized is not None:
            return self._quantized_rows(whole.quantized, *rows)
        weight = packed_rows(self._whole.kept(whole.values), rows)
        bias = None
        if whole.bias is not None:
            bias = torch.cat([self._whole.kept(whole.bias)[each.start : each.stop] for each in rows])
        count = sum(map(len, rows))
        return WeightsArgs(self.keep(weight), self.keep(bias), None, whole.inputs, count, rows[0].start)

    def _quantized_rows(self, whole: int, *rows: range) -> WeightsArgs:
        weight, bias = self._whole.kept_quantized(whole)
        if bias is not None:
            bias = torch.cat([bias[each.start : each.stop] for each in rows])
        return self.keep_quantized(weight.rows(rows), bias, rows[0].start)


def _moved(rows: range, by: int) -> range:
    return range(rows.start + by, rows.stop + by)
