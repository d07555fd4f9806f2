"""Steps for attention kernels: sequences over scattered blocks; random ones suit Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.kv.attention import AttentionMetadata, AttentionOptions, LayerKv
from engine.kv.layout import Segment
from engine.kv.row_codes import KvRows


@dataclass(frozen=True)
class Sequence:
    query_len: int
    context_len: int
    seed: int
    tree: bool = False
    earlier: int = 0
    """Keys of the tree that earlier steps left."""
    first_key: int = 0

    def masks(self) -> list[int]:
        """Return the query rows' masks."""
        rng = random.Random(self.seed)
        paths = [1]
        for row in range(1, self.earlier + self.query_len):
            paths.append(paths[rng.randrange(max(0, row - 5), row)] | 1 << row)
        return paths[self.earlier :]

    def numbers(self, shape: Shape) -> list[Tensor]:
        """Return queries, keys and values of all tokens."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads
        dims = shape.key_dim, shape.key_dim, shape.value_dim
        query, key, value = (
            torch.randn(self.context_len, head, dim, generator=generator).to(shape.dtype)
            for head, dim in zip(heads, dims, strict=True)
        )
        return [query, key, key[..., : shape.value_dim] if shape.values_in_keys else value]

    def first_seen(self, window: int | None) -> int:
        """Return the first key that any row sees."""
        first_row = self.context_len - self.query_len - self.earlier
        return max(self.first_key, first_row - window + 1) if window else self.first_key


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype = torch.float32
    quantization: str = "none"
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    values_in_keys: bool = False

    @property
    def rows(self) -> KvRows:
        return KvRows(self.dtype, self.quantization)


@dataclass(frozen=True)
class Options:
    scale: float = 0.3
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class Case:
    shape: Shape
    options: Options
    sequences: tuple[Sequence, ...]
    padding: int = 0

    def alone(self, index: int) -> Case:
        return replace(self, sequences=(self.sequences[index],), padding=0)

    def rows_of(self, index: int) -> slice:
        first = sum(each.query_len for each in self.sequences[:index])
        return slice(first, first + self.sequences[index].query_len)


@st.composite
def sequences(draw: Any) -> Sequence:
    query_len = draw(st.integers(1, 7))
    before = draw(st.sampled_from([0, 15, 16, 31]) | st.integers(1, 58))
    tree = draw(st.booleans())
    earlier = draw(st.integers(0, min(before, 5))) if tree else 0
    first_key = draw(st.sampled_from([0, 0, min(3, before), before])) if not earlier else 0
    return Sequence(query_len, before + query_len, draw(st.integers(0, 9)), tree, earlier, first_key)


FORMATS = [
    (torch.float32, "none"),
    (torch.bfloat16, "none"),
    (torch.float16, "none"),
    (torch.float32, "int8_row_scales"),
    (torch.bfloat16, "int8_row_scales"),
    (torch.float32, "fp8_row_scales"),
    (torch.bfloat16, "fp8_row_scales"),
]


@st.composite
def cases(draw: Any, formats: Collection[tuple[torch.dtype, str]] = FORMATS) -> Case:
    dtype, quantization = draw(st.sampled_from([*formats]))
    dims = [(16, 16), (40, 24), (64, 64), (8, 32)]
    if quantization == "none":
        dims.append((33, 17))
    key_dim, value_dim = draw(st.sampled_from(dims))
    shape = Shape(
        dtype,
        quantization,
        draw(st.sampled_from([1, 1, 2])),
        draw(st.sampled_from([1, 2, 3, 4, 7])),
        key_dim,
        value_dim,
        draw(st.sampled_from([16, 32, 5])),
    )
    options = Options(
        draw(st.sampled_from([0.3, 1.0])),
        draw(st.sampled_from([None, 1, 3, 20, 50])),
        draw(st.sampled_from([None, 5.0, 0.4])),
        draw(st.booleans()),
    )
    return Case(
        shape, options, tuple(draw(st.lists(sequences(), min_size=1, max_size=2))), draw(st.integers(0, 2))
    )


@dataclass
class Step:
    """A case with numbers. A sequence's numbers depend on the sequence alone."""

    case: Case
    layer: LayerKv
    metadata: AttentionMetadata
    new: tuple[Tensor, Tensor, Tensor]
    sinks: Tensor | None
    rows: KvRows = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.case.shape.rows

    @classmethod
    def of(cls, case: Case) -> Step:
        shape, size = case.shape, case.shape.block_size
        counts = [-(-each.context_len // size) for each in case.sequences]
        blocks = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1)).int()
        dims = shape.key_dim, shape.value_dim
        layer = _of_shape(shape, *empty_layer(shape.rows, shape.kv_heads, dims, len(blocks), size))
        table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        parts, slots, taken = [], [], 0
        for each, count, row in zip(case.sequences, counts, table, strict=True):
            row[:count] = blocks[taken : taken + count]
            taken += count
            numbers = each.numbers(shape)
            place = torch.arange(each.context_len)
            slot = row[place // size].long() * size + place % size
            old = slot[: -each.query_len]
            put_rows(layer, shape.rows, old, *(values[: -each.query_len] for values in numbers[1:]))
            slots.append(slot[-each.query_len :])
            parts.append([values[-each.query_len :] for values in numbers])
        pad = torch.zeros(case.padding, 1, 1, dtype=shape.dtype)
        new = [torch.cat([*side, pad.expand(-1, *side[0].shape[1:])]) for side in zip(*parts, strict=True)]
        slots.append(torch.full((case.padding,), -1))
        sinks = torch.linspace(-3, 3, shape.kv_heads * shape.group) if case.options.sinks else None
        return cls(case, layer, _metadata(case, table, torch.cat(slots)), tuple(new), sinks)

    def to(self, device: torch.device) -> Step:
        layer = _of_shape(self.case.shape, *_moved(self.layer, device))
        metadata = replace(
            self.metadata,
            **{
                each.name: value.to(device)
                for each in fields(self.metadata)
                if isinstance(value := getattr(self.metadata, each.name), Tensor)
            },
        )
        new = [tensor.to(device) for tensor in self.new]
        sinks = None if self.sinks is None else self.sinks.to(device)
        return Step(self.case, layer, metadata, tuple(new), sinks)

    def run(self, backend: Any) -> Tensor:
        """Run the step on a backend class."""
        attention = backend([self.layer], rows=self.rows)
        attention.plan(self.metadata)
        attention.begin_step(self.metadata)
        options = self.case.options
        scale = options.scale * self.case.shape.key_dim**-0.5
        how = AttentionOptions(scale, options.sliding_window or 0, options.softcap or 0.0, self.sinks)
        return attention.forward(0, *self.new, how)

    def forget_unseen(self) -> None:
        """Set keys that no row sees to NaN, like blocks that others may have reused."""
        size, window = self.case.shape.block_size, self.case.options.sliding_window
        for each, table in zip(self.case.sequences, self.metadata.block_table, strict=True):
            place = torch.arange(each.first_seen(window))
            slots = table[place // size].long() * size + place % size
            put_rows(self.layer, self.rows, slots, *(new[:1] * torch.nan for new in self.new[1:]))

    def in_float64(self) -> Step:
        """Return the same values in float64, with quantized ones decoded."""
        exact = KvRows(torch.float32, self.rows.quantization)
        decoded = LayerKv(*(exact.decode(side).double() for side in self.layer.sides))
        new = [tensor.double() for tensor in self.new]
        if self.rows.coded:
            new[1:] = [exact.decode(exact.encode(tensor)).double() for tensor in new[1:]]
        shape = replace(self.case.shape, dtype=torch.float64, quantization="none")
        return Step(replace(self.case, shape=shape), decoded, self.metadata, tuple(new), self.sinks)


def empty_layer(
    rows: KvRows, kv_heads: int, dims: tuple[int, int], num_blocks: int, block_size: int
) -> LayerKv:
    """Return a layer of a pool of two, with a block's values behind its keys. It is filled with NaN, which
    must not be read.
    """
    segments = [
        Segment(1, kv_heads, dim, rows.dtype, num_planes=1, quantization=rows.quantization) for dim in dims
    ]
    sizes = [segment.block_bytes(block_size) for segment in segments]
    memory = torch.zeros(num_blocks, 2 * sum(sizes), dtype=torch.uint8)
    sides = []
    for segment, part in zip(segments, memory[:, sum(sizes) :].split(sizes, dim=1), strict=True):
        side = segment.views(part, block_size)
        (side.values if side.scales is None else side.scales).fill_(torch.nan)
        sides.append(side.part(slice(None), 0, 0))
    return LayerKv.of_sides(*sides)


def put_rows(layer: LayerKv, rows: KvRows, slots: Tensor, *new: Tensor) -> None:
    """Put keys and values [slots, kv_heads, dim] into a layer."""
    block_size = layer.keys.shape[1]
    blocks, places = slots // block_size, slots % block_size
    for pool, side in zip(layer.sides, new, strict=True):
        stored = rows.encode(side)
        pool.values[blocks, places] = stored.values
        if pool.scales is not None and stored.scales is not None:
            pool.scales[blocks, places] = stored.scales


def _of_shape(shape: Shape, keys: Tensor, values: Tensor, *scales: Tensor | None) -> LayerKv:
    return LayerKv(keys, keys[..., : shape.value_dim] if shape.values_in_keys else values, *scales)


def _moved(layer: LayerKv, device: torch.device) -> list[Any]:
    """Move a layer to a device, keeping its strides in the pool."""
    moved: list[Tensor | None] = []
    for side in layer:
        if side is None:
            moved.append(None)
            continue
        whole = side.as_strided((side.untyped_storage().nbytes() // side.itemsize,), (1,), 0)
        moved.append(whole.to(device).as_strided(side.shape, side.stride(), side.storage_offset()))
    return moved


def _metadata(case: Case, table: Tensor, slots: Tensor) -> AttentionMetadata:
    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    lengths = [each.query_len for each in case.sequences]
    starts = [
        each.context_len - each.query_len - each.earlier if each.tree else -1 for each in case.sequences
    ]
    trees = any(each.tree for each in case.sequences)
    masks = [
        mask for each in case.sequences for mask in (each.masks() if each.tree else [0] * each.query_len)
    ]
    masks += [0] * case.padding
    first_keys = [each.first_key for each in case.sequences]
    return AttentionMetadata(
        query_start=int32([0, *lengths]).cumsum(0).int(),
        context_len=int32([each.context_len for each in case.sequences]),
        block_table=table,
        slot_mapping=slots,
        max_query_len=max(lengths),
        max_context_len=max(each.context_len for each in case.sequences),
        visible=torch.tensor([mask - (mask >> 63 << 64) for mask in masks]) if trees else None,
        tree_start=int32(starts) if trees else None,
        first_key=int32(first_keys) if any(first_keys) else None,
        query_lens=lengths,
    )
