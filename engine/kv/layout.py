"""The layout of a block of the pool: groups of layers, their segments, and each layer's place in a segment.

A block holds `block_size` tokens of all groups: the groups' segments, one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.kv.row_codes import KvRows, StoredRows
from engine.kv.state_slots import StateLayout
from protocol.handoff import PAGED, WINDOWED, SegmentInfo

TARGET, DRAFT = "target", "draft"


@dataclass(frozen=True)
class Segment:
    """Layers of one shape. For each token a layer has `num_planes` planes, e.g. keys and values.

    `dtype` is the type that the model computes; `quantization` is the stored form (`engine.kv.row_codes`).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_planes: int = 2
    quantization: str = "none"

    @property
    def rows(self) -> KvRows:
        return KvRows(self.dtype, self.quantization)

    def block_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        return (self.num_layers, self.num_planes, block_size, self.num_kv_heads, self.head_dim)

    def block_bytes(self, block_size: int) -> int:
        return math.prod(self.block_shape(block_size)[:-1]) * self.rows.row_bytes(self.head_dim)

    def views(self, blocks: Tensor, block_size: int) -> StoredRows:
        """Return views of bytes [num_blocks, block_bytes]: values [num_blocks, *block_shape] and, for coded
        rows, scales [num_blocks, num_layers, num_planes, block_size, num_kv_heads]. A token's scales follow
        its codes.
        """
        *tokens, heads, head_dim = self.block_shape(block_size)
        stored, end = blocks.unflatten(1, (*tokens, -1)), heads * head_dim * self.rows.stored_dtype.itemsize
        values = stored[..., :end].view(self.rows.stored_dtype).unflatten(4, (heads, head_dim))
        return StoredRows(values, stored[..., end:].view(torch.float32) if self.rows.coded else None)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LayerShape:
    """Shape of a layer's keys and values for one token. In some models they differ in size."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False
    """Whether the value is the beginning of the key, with one head: latent attention."""

    @property
    def num_values(self) -> int:
        return self.num_kv_heads * (self.key_dim + (0 if self.values_in_keys else self.value_dim))

    def segments(self, num_layers: int, dtype: torch.dtype) -> tuple[Segment, ...]:
        """Return the segments of `num_layers` such layers: one, or one for keys and one for values."""
        if self.key_dim == self.value_dim:
            return (Segment(num_layers, self.num_kv_heads, self.key_dim, dtype),)
        dims = (self.key_dim,) if self.values_in_keys else (self.key_dim, self.value_dim)
        return tuple(Segment(num_layers, self.num_kv_heads, dim, dtype, num_planes=1) for dim in dims)

    def place(self, segment: int, index: int) -> LayerPlace:
        """Return the place of layer `index`; `segment` is the number of the first of `segments`."""
        if self.values_in_keys:
            return LayerPlace(segment, index, value_dim=self.value_dim)
        return LayerPlace(segment, index, segment + 1 if self.key_dim != self.value_dim else None)


@dataclass(frozen=True)
class LayerPlace:
    """Place of a layer's KV: layer `index` of its group's `segment`. The segment has only keys if the values
    are at the same index of `value_segment`, or are the first `value_dim` values of each key. With a `shape`,
    layers of several shapes share the segment's rows: the layer's keys, then its values, begin at value
    `first` of each row.
    """

    segment: int
    index: int
    value_segment: int | None = None
    table: int = 0
    """The block table of the layer."""
    value_dim: int | None = None
    first: int = 0
    shape: LayerShape | None = None


MOST_TABLES = 16
"""Greatest number of block tables: the number of extents that a lease can have."""
_MOST_PADDING = 0.25
"""Greatest share of layer places that may stay empty. With more, padding costs what windows save."""


@dataclass(frozen=True)
class Group:
    """The KV of one model. Layers that share their KV have the same place."""

    name: str
    segments: tuple[Segment, ...]
    layers: tuple[LayerPlace, ...]
    layer_windows: tuple[int, ...] = ()
    """The most tokens that rows of each layer see, their own included; 0: all. Empty: all layers see all."""
    windows: tuple[int, ...] = (0,)
    """The most tokens that rows see in each block table; 0: all. With one table, its blocks hold all layers.
    """

    @classmethod
    def uniform(cls, name: str, segment: Segment) -> Group:
        """Make a group with a place of its own for each layer of one segment."""
        return cls(name, (segment,), tuple(LayerPlace(0, index) for index in range(segment.num_layers)))

    @classmethod
    def of_layers(
        cls,
        name: str,
        layers: Sequence[LayerShape | int | None],
        dtype: torch.dtype,
        layer_windows: Sequence[int] = (),
    ) -> Group:
        """Make a group with a segment for the layers of each shape. A number stands for an earlier layer,
        whose KV this layer shares. None is a layer without KV: its place is never read or written.
        """
        counts = Counter(layer for layer in layers if isinstance(layer, LayerShape))
        segments: list[Segment] = []
        firsts: dict[LayerShape, int] = {}
        for shape, count in counts.items():
            firsts[shape] = len(segments)
            segments += shape.segments(count, dtype)
        places: list[LayerPlace] = []
        taken: Counter[LayerShape] = Counter()
        for layer in layers:
            if layer is None:
                places.append(next(iter(firsts)).place(0, 0))
                continue
            if isinstance(layer, int):
                places.append(places[layer])
                continue
            places.append(layer.place(firsts[layer], taken[layer]))
            taken[layer] += 1
        return cls(name, tuple(segments), tuple(places), layer_windows=tuple(layer_windows))

    def in_tables(self, longest: int, *, rows: bool = True) -> Group:
        """Return the same KV in block tables by how much of a sequence of at most `longest` tokens layers
        see: a table of layers with a sliding window needs no blocks before the window. Layers of several
        shapes share rows, if `rows` allows it. With a `fault` all layers stay in one table.
        """
        layer_windows = self._windows_within(longest)
        if len({*layer_windows}) == 1:
            return replace(self, windows=(layer_windows[0],))
        return self if not layer_windows or self.fault(longest, rows=rows) else self._divided(layer_windows)

    def fault(self, longest: int, *, rows: bool = True) -> str:
        """Return why layers with a sliding window must keep all tokens; "" if none must."""
        layer_windows = self._windows_within(longest)
        if len({*layer_windows}) <= 1:
            return ""
        window_of = dict(zip(self.layers, layer_windows, strict=True))
        if any(window_of[place] != window for place, window in zip(self.layers, layer_windows, strict=True)):
            return "layers that share their KV see unlike parts of it"
        is_coded = not rows or self.rows.coded or any(place.value_dim for place in self.layers)
        if self._has_several_shapes and is_coded:
            return "layers have KV of several shapes, which is kept or sent in codes"
        divided = self._divided(layer_windows)
        whole = sum(self._shape(place).num_values for place in window_of)
        if divided.num_tables <= MOST_TABLES and divided.num_values <= whole / (1 - _MOST_PADDING):
            return ""
        if self._has_several_shapes:
            return "layers have KV of several shapes that do not divide"
        fewest = min(map(len, self._by_window(layer_windows).values()))
        return f"{len(window_of)} layers of which {fewest} are unlike the others do not divide"

    def draft_fault(self, draft: Group) -> str:
        """Return why a draft's KV cannot be in blocks of these tables; "" if it can. It is in the first
        table, whose layers must see as much as the draft's. In other tables its places stay empty.
        """
        widest = self.windows[0]
        if widest and not all(0 < window <= widest for window in draft.layer_windows or (0,)):
            return "a draft sees more of a sequence"
        own, drafted = (sum(segment.block_bytes(1) for segment in each.segments) for each in (self, draft))
        padding = (self.num_tables - 1) * drafted / (self.num_tables * (own + drafted))
        if padding > _MOST_PADDING:
            return f"a draft's KV would leave {padding:.0%} of {self.num_tables} tables empty"
        return ""

    def _windows_within(self, longest: int) -> list[int]:
        return [window if window < longest else 0 for window in self.layer_windows]

    def _by_window(self, layer_windows: list[int]) -> dict[int, list[LayerPlace]]:
        """Return the places of layers by window, the widest window first."""
        window_of = dict(zip(self.layers, layer_windows, strict=True))
        order = sorted({*layer_windows}, key=lambda window: window or math.inf, reverse=True)
        return {window: [place for place in window_of if window_of[place] == window] for window in order}

    def layer_shape(self, layer: int) -> LayerShape:
        place = self.layers[layer]
        return place.shape or self._shape(place)

    @property
    def _has_several_shapes(self) -> bool:
        return len({place.segment for place in self.layers}) > 1

    def _shape(self, place: LayerPlace) -> LayerShape:
        keys = self.segments[place.segment]
        values = keys if place.value_segment is None else self.segments[place.value_segment]
        return LayerShape(keys.num_kv_heads, keys.head_dim, values.head_dim)

    def _divided(self, layer_windows: list[int]) -> Group:
        """Return tables with as many layers as have the rarest window or, for several shapes, with rows."""
        if not self._has_several_shapes:
            each = min(map(len, self._by_window(layer_windows).values()))
            laid, windows = self._laid(layer_windows, each, lambda place: 1)
            segments = tuple(replace(segment, num_layers=each) for segment in self.segments)
            moved = {
                place: replace(place, index=index, table=table) for place, (table, index) in laid.items()
            }
        else:
            width = self._row_width(layer_windows)
            laid, windows = self._laid(layer_windows, width, lambda place: self._shape(place).num_values)
            segments = (Segment(1, 1, width, self.segments[0].dtype, num_planes=1),)
            moved = {
                place: LayerPlace(0, 0, table=table, first=first, shape=self._shape(place))
                for place, (table, first) in laid.items()
            }
        layers = tuple(moved[place] for place in self.layers)
        return replace(self, segments=segments, layers=layers, windows=tuple(windows))

    def _laid(
        self, layer_windows: list[int], room: int, size: Callable[[LayerPlace], int]
    ) -> tuple[dict[LayerPlace, tuple[int, int]], list[int]]:
        """Fill tables of size `room` with layers of one window each. Return each layer's table and its offset
        there, and the windows of the tables.
        """
        laid: dict[LayerPlace, tuple[int, int]] = {}
        windows: list[int] = []
        for window, alike in self._by_window(layer_windows).items():
            end = room
            for place in alike:
                if end + size(place) > room:
                    windows.append(window)
                    end = 0
                laid[place] = len(windows) - 1, end
                end += size(place)
        return laid, windows

    def _row_width(self, layer_windows: list[int]) -> int:
        """Return the number of values of a token in a block with which the tables, at most `MOST_TABLES` if
        possible, take the least memory. Candidates are sums over the first layers of one window.
        """
        kinds = self._by_window(layer_windows).values()
        sizes = [[self._shape(place).num_values for place in alike] for alike in kinds]
        least = max(itertools.chain(*sizes))
        widths = {width for each in sizes for width in itertools.accumulate(each) if width >= least}

        def room(width: int) -> tuple[bool, int]:
            num_tables = len(self._laid(layer_windows, width, lambda place: self._shape(place).num_values)[1])
            return num_tables > MOST_TABLES, num_tables * width

        return min(sorted(widths, reverse=True), key=room)

    @property
    def num_tables(self) -> int:
        return len(self.windows)

    @property
    def num_values(self) -> int:
        """Number of values of a token in all tables."""
        per_table = (
            math.prod((s.num_layers, s.num_planes, s.num_kv_heads, s.head_dim)) for s in self.segments
        )
        return self.num_tables * sum(per_table)

    @property
    def rows(self) -> KvRows:
        """The row format of the first segment; attention backends need the same in all segments."""
        return self.segments[0].rows

    def stored_as(self, quantization: str) -> Group:
        """Return the same KV, stored with `quantization`. Raise ValueError if its heads do not allow it."""
        if any(place.value_dim for place in self.layers):
            raise ValueError("latents, of which heads make their keys and values, are kept as they are")
        segments = tuple(replace(segment, quantization=quantization) for segment in self.segments)
        for segment in segments:
            if fault := segment.rows.fault(segment.head_dim):
                raise ValueError(fault)
        return replace(self, segments=segments)

    def segment_name(self, index: int) -> str:
        """Return the segment's name, which is unique in the pool."""
        return f"{self.name}.{index}" if index else self.name

    def describe(self, block_size: int) -> str:
        """Return the name of the format, so that KV of different formats never shares an identity."""
        shapes = []
        for segment in self.segments:
            layers, planes, *_ = segment.block_shape(block_size)
            shape = f"{layers}x{segment.num_kv_heads}x{segment.head_dim}"
            values = segment.dtype_name + (f":{segment.quantization}" if segment.rows.coded else "")
            shapes.append(f"{values}/{shape}" + (f"x{planes}" if planes != 2 else ""))
        tables = f"/{self.num_tables} tables" if self.num_tables > 1 else ""
        return f"{'+'.join(shapes)}/{block_size}{tables}"


@dataclass(frozen=True)
class PoolLayout:
    """The groups of a block, and `num_state_slots` state slots for the recurrent `state` of the model and for
    the draft's, if they have recurrent layers.
    """

    groups: tuple[Group, ...]
    block_size: int
    state: StateLayout | None = None
    num_state_slots: int = 0
    draft_state: StateLayout | None = None

    @property
    def windows(self) -> tuple[int, ...]:
        """The number of a sequence's last tokens that keep KV in each block table; 0: all."""
        return self.groups[0].windows

    @property
    def state_slot_bytes(self) -> int:
        """Bytes of one sequence's state slots."""
        return sum(state.state_slot_bytes for state in (self.state, self.draft_state) if state is not None)

    @property
    def state_slots_bytes(self) -> int:
        return self.num_state_slots * self.state_slot_bytes

    @property
    def state_blocks(self) -> int:
        """Number of ordinary blocks that hold a state which is kept or sent."""
        return -(-self.state.state_bytes // self.block_bytes) if self.state is not None else 0

    @property
    def state_unit(self) -> int:
        """Number of tokens at whose multiples states are kept: grid points at which a block ends."""
        return math.lcm(self.state.grid, self.block_size) if self.state is not None else 0

    @property
    def block_bytes(self) -> int:
        return sum(segment.block_bytes(self.block_size) for segment in self.segments.values())

    @property
    def segments(self) -> dict[str, Segment]:
        """The segments by name, in their order in a block."""
        return {
            group.segment_name(index): segment
            for group in self.groups
            for index, segment in enumerate(group.segments)
        }

    def views(self, memory: Tensor) -> dict[str, StoredRows]:
        """Return views of the segments in blocks, uint8 [num_blocks, block_bytes], by name."""
        parts = memory.split([each.block_bytes(self.block_size) for each in self.segments.values()], 1)
        pairs = zip(self.segments.items(), parts, strict=True)
        return {name: segment.views(part, self.block_size) for (name, segment), part in pairs}

    def describe(self) -> list[SegmentInfo]:
        """Return the segments in the form that other workers read."""
        size = self.block_size
        return [
            SegmentInfo(
                name=name,
                dtype=segment.dtype_name,
                shape=segment.block_shape(size),
                kind=WINDOWED if any(self.windows) else PAGED,
                quantization=segment.quantization,
            )
            for name, segment in self.segments.items()
        ]
