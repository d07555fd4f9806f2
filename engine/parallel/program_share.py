"""A rank's share of a program: its attention heads, its outputs of all products, and its experts.

Queries, keys and values are not gathered, since a rank attends with its own heads; nor are gates and values
of an MLP. So a layer gathers four times: before and after the attention's output product, and before and
after the MLP's down product. Every rank runs other mixers on whole rows. The native decoder's model is
divided alike.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from engine.devices.cpu.decoder.native_model import LayerArgs, ModelArgs, NativeModel, WeightsArgs
from engine.devices.torch.operations import side_by_side
from engine.linear.experts import are_experts
from engine.linear.packed import PANEL, packed_rows, rows_of
from engine.lora.table import Adapters
from engine.model.program import Attention, Experts, Mlp, ModelProgram, Product, Rotation
from engine.parallel.division import (
    LINEARS,
    ExpertsShare,
    Heads,
    heads_of,
    moved,
    part_of,
    query_columns,
    times,
)
from engine.parallel.group import Columns, Ranks, SharedRanks

Prepare = Callable[[nn.Module], nn.Module]
"""A function that brings a linear layer into the form that the device's kernels read."""


def program_share(
    program: ModelProgram,
    ranks: Ranks,
    device: torch.device,
    prepare: Prepare = lambda part: part,
    adapters: Adapters | None = None,
) -> ModelProgram:
    """Return this rank's share of the program, prepared on its device. `adapters` are told its outputs."""
    outputs = {} if adapters is None else adapters.outputs
    attentions = [mixer for layer in program.layers for mixer in layer.mixers if isinstance(mixer, Attention)]
    keys = {mixer.layer: mixer.kv_heads for mixer in attentions if mixer.sides}
    share: ModelProgram = _Divider(ranks, device, prepare, outputs, keys).share(program)
    return share


class _Divider:
    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        prepare: Prepare,
        outputs: dict[str, Sequence[range]],
        keys: dict[int, int],
    ) -> None:
        """Tell the outputs that are kept. `keys` are the KV heads by the layer that writes them."""
        self._ranks, self._device, self._prepare = ranks, device, prepare
        self._outputs, self._keys = outputs, keys

    def share(self, whole: Any) -> Any:
        """Divide what can be divided, and move the rest to the device."""
        match whole:
            case Tensor():
                return whole.to(self._device)
            case Rotation():
                return whole
            case Attention():
                return self._attention(whole)
            case Product():
                return self._divided(whole, PANEL * self._ranks.size)
            case Mlp():
                return self._mlp(whole)
            case Experts():
                return self._experts(whole)
            case nn.Module():
                return self._placed(copy.deepcopy(whole))
            case tuple():
                return tuple(map(self.share, whole))
        if is_dataclass(whole) and not isinstance(whole, type):
            return replace(
                whole, **{each.name: self.share(getattr(whole, each.name)) for each in fields(whole)}
            )
        return whole

    def _attention(self, whole: Attention) -> Attention:
        dim, outputs, sinks = whole.head_dim, whole.inputs.outputs, whole.sinks
        keys = self._keys[whole.layer if whole.source is None else whole.source]
        query_size = whole.query_size // whole.heads
        own = heads_of(whole.heads, keys, self._ranks.size)[self._ranks.rank]
        gathered = query_columns(whole.heads, keys, self._ranks.size).times(dim)
        norms = {name: self.share(getattr(whole, name)) for name in ("query_norm", "key_norm", "value_norm")}
        return replace(
            whole,
            inputs=self._rows(whole.inputs, own.rows(dim, query_size, whole.heads, outputs, whole.sides)),
            output=self._gathering(whole.output, gathered),
            heads=len(own.queries),
            sinks=None if sinks is None else sinks[own.queries.start : own.queries.stop].to(self._device),
            **norms,
        )

    def _mlp(self, whole: Mlp) -> Mlp:
        made = whole.gate_up.outputs // (2 if whole.is_gated else 1)
        columns = self._ranks.columns(made, PANEL)
        own = columns.parts[self._ranks.rank]
        rows = [own, moved(own, made)] if whole.is_gated else [own]
        gate_up, down = self._rows(whole.gate_up, rows), self._gathering(whole.down, columns)
        return replace(whole, gate_up=gate_up, down=down)

    def _experts(self, whole: Experts) -> Experts:
        experts = whole.holder.experts
        divides = are_experts(experts) and experts.num_experts >= self._ranks.size
        if divides:
            share = ExpertsShare(experts, self._ranks).to(self._device)
            share.part = self._placed(share.part)
        else:
            share = self.share(experts)
        names = ("router", "router_bias", "preferences", "shared_gate", "factors", "norms")
        tensors = {name: self.share(getattr(whole, name)) for name in names}
        return replace(whole, holder=SimpleNamespace(experts=share), **tensors)

    def _rows(self, whole: Product, rows: Sequence[range]) -> Product:
        """Return a product with only these outputs, which stay on this rank."""
        parts, first = [], 0
        for number, linear in enumerate(whole.linears):
            last = first + linear.out_features
            own = [range(max(each.start, first) - first, min(each.stop, last) - first) for each in rows]
            own = [each for each in own if len(each)]
            is_whole = own == [range(linear.out_features)]
            parts.append(self._placed(copy.deepcopy(linear) if is_whole else part_of(linear, own)))
            if whole.paths:
                self._outputs[whole.paths[number]] = own
            first = last
        factors = whole.multipliers
        if factors is not None:
            factors = torch.cat([factors[each.start : each.stop] for each in rows]).to(self._device)
        return replace(whole, linears=tuple(parts), multipliers=factors)

    def _gathering(self, whole: Product, inputs: Columns) -> Product:
        """Return a product whose input is gathered first: each rank has some columns, `inputs`."""
        return replace(self._divided(whole, 0), enter=partial(self._ranks.gather, columns=inputs))

    def _divided(self, whole: Product, least: int) -> Product:
        """Divide a product whose outputs all ranks need. A gather of fewer than `least` would not pay."""
        columns: list[Columns | None] = []
        rows, first = [], 0
        for linear in whole.linears:
            count = linear.out_features
            own = self._ranks.columns(count, PANEL) if type(linear) in LINEARS and count >= least else None
            columns.append(own)
            rows.append(moved(range(count) if own is None else own.parts[self._ranks.rank], first))
            first += count

        def leave(out: Tensor) -> Tensor:
            parts = out.split([len(each) for each in rows], dim=-1)
            pairs = zip(parts, columns, strict=True)
            return side_by_side(
                [part if own is None else self._ranks.gather(part, own) for part, own in pairs]
            )

        return replace(self._rows(whole, rows), leave=leave)

    def _placed(self, part: nn.Module) -> nn.Module:
        return self._prepare(part.to(self._device))


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
