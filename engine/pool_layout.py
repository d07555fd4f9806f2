"""What lies in a block of the pool: groups of layers, their segments, and each layer's place in these.

The pool has one or more arenas, each of blocks of one size. A block holds `block_size` tokens of all groups
of its arena: their segments, one after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from engine.kv_rows import KvRows
from engine.recurrent.layout import StateLayout
from protocol.handoff import PAGED, WINDOWED, SegmentInfo

TARGET, DRAFT = "target", "draft"


@dataclass(frozen=True)
class Segment:
    """Layers of one shape. For each token a layer has `num_planes` planes, e.g. its keys and values.

    `dtype` is what the model computes; `quantization` says how the pool keeps it (`engine.kv_rows`).
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

    def stored_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        """The same in elements as they are stored."""
        return (*self.block_shape(block_size)[:-1], self.rows.width(self.head_dim))

    def block_bytes(self, block_size: int) -> int:
        return math.prod(self.stored_shape(block_size)) * self.rows.stored_dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class LayerShape:
    """What a layer keeps of a token: keys and values, in some models of different sizes."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def segments(self, num_layers: int, dtype: torch.dtype) -> tuple[Segment, ...]:
        """Of so many such layers: one, or one of the keys and one of the values."""
        if self.key_dim == self.value_dim:
            return (Segment(num_layers, self.num_kv_heads, self.key_dim, dtype),)
        dims = self.key_dim, self.value_dim
        return tuple(Segment(num_layers, self.num_kv_heads, dim, dtype, num_planes=1) for dim in dims)


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer's KV lies: `index` among the layers of its group's `segment`. This has the keys alone
    where the values lie at the same index of `value_segment`.
    """

    segment: int
    index: int
    value_segment: int | None = None


@dataclass(frozen=True)
class Group:
    """The KV of one model, in one arena. Layers that share their KV have the same place."""

    name: str
    segments: tuple[Segment, ...]
    layers: tuple[LayerPlace, ...]
    arena: int = 0
    window: int = 0
    """Tokens that rows see at most, their own among them; 0 where some layer sees all."""

    @classmethod
    def uniform(cls, name: str, segment: Segment) -> Group:
        """Each layer has its own place in one segment."""
        return cls(name, (segment,), tuple(LayerPlace(0, index) for index in range(segment.num_layers)))

    @classmethod
    def of_layers(
        cls, name: str, layers: Sequence[LayerShape | int | None], dtype: torch.dtype, window: int = 0
    ) -> Group:
        """Layers of one shape lie together. A number stands for the KV of an earlier layer, which this one
        shares. None is a layer without KV: it has a place by name alone, which nobody reads or writes.
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
                places.append(LayerPlace(0, 0, 1 if segments[0].num_planes == 1 else None))
                continue
            if isinstance(layer, int):
                places.append(places[layer])
                continue
            first, unlike = firsts[layer], layer.key_dim != layer.value_dim
            places.append(LayerPlace(first, taken[layer], first + 1 if unlike else None))
            taken[layer] += 1
        return cls(name, tuple(segments), tuple(places), window=window)

    @property
    def num_values(self) -> int:
        """Of a token, in all layers."""
        return sum(math.prod((s.num_layers, s.num_planes, s.num_kv_heads, s.head_dim)) for s in self.segments)

    @property
    def rows(self) -> KvRows:
        """Of the first segment, and all others where an attention backend reads them."""
        return self.segments[0].rows

    def stored_as(self, quantization: str) -> Group:
        """The same KV, kept otherwise. Raises ValueError for heads that can't be kept so."""
        segments = tuple(replace(segment, quantization=quantization) for segment in self.segments)
        for segment in segments:
            if fault := segment.rows.fault(segment.head_dim):
                raise ValueError(fault)
        return replace(self, segments=segments)

    def segment_name(self, index: int) -> str:
        """Unique in the pool."""
        return f"{self.name}.{index}" if index else self.name

    def describe(self, block_size: int) -> str:
        """Names the format, so that unlike KV never shares an identity."""
        shapes = []
        for segment in self.segments:
            layers, planes, *_ = segment.block_shape(block_size)
            shape = f"{layers}x{segment.num_kv_heads}x{segment.head_dim}"
            values = segment.dtype_name + (f":{segment.quantization}" if segment.rows.coded else "")
            shapes.append(f"{values}/{shape}" + (f"x{planes}" if planes != 2 else ""))
        return f"{'+'.join(shapes)}/{block_size}"


@dataclass(frozen=True)
class PoolLayout:
    """Beside the blocks there are `num_seats` seats for the `state` of recurrent layers, and for that of the
    draft's, if there are any.
    """

    groups: tuple[Group, ...]
    block_size: int
    state: StateLayout | None = None
    num_seats: int = 0
    draft_state: StateLayout | None = None

    @property
    def window(self) -> int:
        """Only the last so many tokens of a sequence keep their KV; 0: all do, as a draft, which may have to
        catch up, and a state, which lags behind its tokens, ask for.
        """
        alone = len(self.groups) == 1 and self.state is None
        return self.groups[0].window if alone else 0

    @property
    def seat_bytes(self) -> int:
        """Of one sequence."""
        return sum(state.seat_bytes for state in (self.state, self.draft_state) if state is not None)

    @property
    def seats_bytes(self) -> int:
        return self.num_seats * self.seat_bytes

    @property
    def state_blocks(self) -> int:
        """Blocks that hold a state which is kept or moves; they are like all others."""
        return -(-self.state.state_bytes // self.block_bytes) if self.state is not None else 0

    @property
    def state_unit(self) -> int:
        """States are kept at multiples of so many tokens: grid points at which a block ends."""
        return math.lcm(self.state.grid, self.block_size) if self.state is not None else 0

    @property
    def block_bytes(self) -> int:
        """Of one block of each arena."""
        return sum(segment.block_bytes(self.block_size) for g in self.groups for segment in g.segments)

    def arenas(self) -> list[dict[str, Segment]]:
        """Each arena's segments by name, in the order in which they lie in a block."""
        arenas: list[dict[str, Segment]] = [{} for _ in range(1 + max(g.arena for g in self.groups))]
        for group in self.groups:
            for index, segment in enumerate(group.segments):
                arenas[group.arena][group.segment_name(index)] = segment
        return arenas

    def describe(self) -> list[SegmentInfo]:
        """For peers."""
        size = self.block_size
        return [
            SegmentInfo(
                name=name,
                dtype=segment.dtype_name,
                shape=segment.block_shape(size),
                kind=WINDOWED if self.window else PAGED,
                arena=arena,
                quantization=segment.quantization,
            )
            for arena, segments in enumerate(self.arenas())
            for name, segment in segments.items()
        ]
