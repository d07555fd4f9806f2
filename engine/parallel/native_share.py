"""A rank's share of a model that the native decoder runs."""

from __future__ import annotations

import ctypes

from engine.devices.cpu.decoder.native_model import LayerArgs, ModelArgs, NativeModel, WeightsArgs
from engine.linear.packed import PANEL, packed_rows, rows_of
from engine.parallel.division import Heads, moved, times
from engine.parallel.shared_ranks import SharedRanks


class DescriptionShare(NativeModel):
    """A rank's share of a native model. It uses the whole model's memory, except for copies of packed weights
    whose outputs for this rank are not contiguous there in whole panels: QKV, and gate with up.
    """

    def __init__(self, whole: NativeModel, heads: Heads, ranks: SharedRanks) -> None:
        super().__init__(whole.dtype)
        self._whole = whole  # owns most of the memory
        self._ranks = ranks
        args = whole.model
        queries, keys = (times(own, args.head_dim) for own in heads)
        gated, hidden = self._own(whole.layers[0].down.inputs), self._own(args.hidden)
        own = (queries, keys, keys), (), (hidden,), (gated, gated), (hidden,), ()
        self.columns = {
            path: columns
            for paths in whole.paths
            for names, ranges in zip(paths, own, strict=True)
            for path, columns in zip(names, ranges, strict=False)
        }
        self.paths = whole.paths
        self._heads = heads
        self.layers = (LayerArgs * args.num_layers)(
            *(self._layer(each, args, hidden, gated) for each in whole.layers)
        )
        self.model = ModelArgs.from_buffer_copy(args)
        self.model.layers = ctypes.addressof(self.layers)
        self.model.num_heads = len(heads.queries)
        self.model.products = args.products // ranks.size
        self.model.head = self._rows(args.head, self._own(args.vocab))
        self.model.ranks, self.model.gather = ranks.addresses

    def _layer(self, whole: LayerArgs, model: ModelArgs, hidden: range, gated: range) -> LayerArgs:
        layer = LayerArgs.from_buffer_copy(whole)
        own = self._heads.rows(model.head_dim, model.head_dim, model.num_heads, whole.qkv.outputs)
        layer.qkv = self._rows(whole.qkv, *own)
        layer.output = self._rows(whole.output, hidden)
        layer.gate_up = self._rows(whole.gate_up, gated, moved(gated, whole.down.inputs))
        layer.down = self._rows(whole.down, hidden)
        return layer

    def _own(self, outputs: int) -> range:
        return self._ranks.columns(outputs, PANEL).parts[self._ranks.rank]

    def _rows(self, whole: WeightsArgs, *rows: range) -> WeightsArgs:
        if whole.quantized is not None:
            return self._quantized_rows(whole.quantized, *rows)
        weight = packed_rows(self._whole.kept(whole.values), rows)
        bias = None if whole.bias is None else rows_of(self._whole.kept(whole.bias), rows)
        count = sum(map(len, rows))
        return WeightsArgs(self.keep(weight), self.keep(bias), None, whole.inputs, count, rows[0].start)

    def _quantized_rows(self, whole: int, *rows: range) -> WeightsArgs:
        weight, bias = self._whole.kept_quantized(whole)
        own = None if bias is None else rows_of(bias, rows)
        return self.keep_quantized(weight.rows(rows), own, rows[0].start)
