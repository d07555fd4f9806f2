"""Runs one rank's share of a model over its heads' part of the worker's pool.

The native decoder runs a share of the packed program. A Transformers model hands over all heads, and its
attention gathers what the ranks compute.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from engine.batch.runner import Fill, ForwardOutput, Runner, Step
from engine.devices.attention import backend_over, select_backend
from engine.devices.cpu.decoder.native_model import NativeModel
from engine.devices.cpu.decoder.structs import LayerArgs, ModelArgs, WeightsArgs
from engine.devices.loaded_model import LoadedModel
from engine.errors import UnsupportedModelError
from engine.kv.attention import AttentionBackend, AttentionMetadata, AttentionOptions
from engine.kv.layout import TARGET
from engine.kv.pool import KVPool
from engine.linear.packed import PANEL, packed_rows
from engine.load.select import build_runner
from engine.parallel.group import Columns, Ranks
from engine.parallel.layers import model_share
from protocol.config import ServeConfig


class ShareRunner:
    """One rank's part of a forward. All ranks of the worker must run the same rows at the same time.

    Each looks at its own heads of the same pool: it has the layout that it has with one rank, so that blocks
    move, are cached and freed without regard to how many ranks there are on either side.
    """

    any_threads = can_fill = False
    chains = None

    def __init__(
        self,
        config: ServeConfig,
        loaded: LoadedModel,
        pool: KVPool,
        ranks: Ranks,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        """Raises UnsupportedModelError where the model's heads can't be divided among so many ranks."""
        self._ranks = ranks
        heads = _share_heads(loaded, ranks)
        layers = [
            layer.of_heads(slice(own.keys.start, own.keys.stop))
            for layer, own in zip(pool.layers(TARGET), heads, strict=True)
        ]
        backend_class, _ = select_backend(loaded.device, loaded.dtype, config.attention_backend)
        backend = backend_over(backend_class, layers, pool.groups[TARGET])
        if loaded.description is not None:
            share = replace(loaded, description=DescriptionShare(loaded.description, heads[0], ranks))
        else:
            share = replace(loaded, model=model_share(loaded.model, ranks))
            backend = OwnHeads(backend, heads, ranks)
        # Not compiled: torch.compile knows nothing of exchanges.
        self._runner: Runner = build_runner(share, backend, "off", hidden_layers)
        self.products = self._runner.products
        self.choice = f"{self._runner.choice}, on {ranks.size} ranks"

    @property
    def deterministic(self) -> bool:
        return self._runner.deterministic

    def warm_up(self) -> float:
        return self._runner.warm_up()

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        """As `Runner.run`. Raises LostRankError."""
        output = self._runner.run(step)
        self._ranks.check()
        return output


def _share_heads(loaded: LoadedModel, ranks: Ranks) -> list[Heads]:
    """Return this rank's heads of each layer."""
    group = loaded.kv_group
    queries = loaded.model.config.get_text_config(decoder=True).num_attention_heads
    if queries % ranks.size:
        model = loaded.model.config.model_type
        raise UnsupportedModelError(
            f"{model}: {queries} attention heads cannot be divided among {ranks.size} tensor-parallel ranks"
        )
    keys = [group.segments[place.segment].num_kv_heads for place in group.layers]
    return [own_heads(queries, count, ranks) for count in keys]


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


class Heads(NamedTuple):
    """A rank's attention heads, and the KV heads that they read, of which each serves equally many here."""

    queries: range
    keys: range


def own_heads(queries: int, keys: int, ranks: Ranks) -> Heads:
    """Return a rank's share of the attention and KV heads. With more ranks than KV heads, several ranks have
    the same one: each writes the same values to its place in the pool, and has some of its attention heads.
    """
    group = queries // keys
    if ranks.size <= keys:
        own = ranks.own(keys)
        return Heads(range(own.start * group, own.stop * group), own)
    key = ranks.rank * keys // ranks.size
    sharing = [rank for rank in range(ranks.size) if rank * keys // ranks.size == key]
    place = sharing.index(ranks.rank)
    first, last = (key * group + end * group // len(sharing) for end in (place, place + 1))
    return Heads(range(first, last), range(key, key + 1))


class OwnHeads(AttentionBackend):
    """Attention over the pool's own KV heads: attends with the rank's own heads, and gathers."""

    def __init__(self, backend: AttentionBackend, heads: Sequence[Heads], ranks: Ranks) -> None:
        """`heads` are those of each layer."""
        self.name, self.block_size = backend.name, backend.block_size
        self.num_tables = backend.num_tables
        self._backend = backend
        self._heads = heads
        self._ranks = ranks

    def plan(self, metadata: AttentionMetadata) -> None:
        self._backend.plan(metadata)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._backend.begin_step(metadata)

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """As `AttentionBackend.forward`, of all heads. Raises LostRankError."""
        queries, keys = (slice(heads.start, heads.stop) for heads in self._heads[layer])
        attended = self._backend.forward(
            layer,
            query[:, queries],
            key[:, keys],
            value[:, keys],
            options._replace(sinks=None if options.sinks is None else options.sinks[queries]),
        )
        (rows, count, _), size = query.shape, value.shape[2]
        columns = Columns(range(queries.start * size, queries.stop * size), count * size)
        return self._ranks.gather(attended.flatten(1), columns).view(rows, count, size)
