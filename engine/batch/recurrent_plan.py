"""Tables that tell kernels where a step's rows find their inputs: made on the host, once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from engine.kv.state_layout import StateLayout
from engine.kv.state_slots import RowSpan
from engine.triton_support import ceil_div, power_of_two

Array = TypeVar("Array")
Other = TypeVar("Other")

NOTHING = -(2**31)
"""Stands where nothing is. Other negative sources lie in the state slot: -1 - i at place i of its window,
and from
-1 - window on the convolution's inputs before the grid point, backwards. Those from 0 on are the step's rows.
"""

SEQUENCE_COLUMNS = 8
"""A sequence: its state slot; the first row's place; its first row, the first one that its window keeps
and the
one behind its last; its first tile and the one behind its last; and, of the sequences whose drafts go on
behind a grid point, its number.
"""

NO_SEAT = -1
"""The state slot of a sequence that pads the table. Its rows pad the step, give zeros and keep nothing."""

TILE_COLUMNS = 3
"""A tile: its first new row, the end of the new rows, and flags. Then come its rows' sources."""

DRAFTED, ADVANCE, CERTAIN = 1, 2, 4
"""Flags of a tile. Its rows follow a state behind drafted tokens, not the state slot's. The state behind
its rows is wanted; and the state slot gets it.
"""


class Tables(NamedTuple, Generic[Array]):
    """All int32. A tile has the rows of one grid, each at its position modulo that: the new rows of a chain
    between two grid points, or the path to one new row of a tree.
    """

    sequences: Array
    """[sequences, SEQUENCE_COLUMNS]"""
    before: Array
    """[rows, reach]: sources of what a convolution reads before each row"""
    tails: Array
    """[sequences, reach]: and of what it will read before the new grid point"""
    tiles: Array
    """[tiles, TILE_COLUMNS + tile_rows(grid)]"""
    num_drafted: int
    """Sequences whose drafts go on behind a grid point."""

    @property
    def arrays(self) -> list[Array]:
        return [self.sequences, self.before, self.tails, self.tiles]

    def on(self, arrays: Sequence[Other]) -> Tables[Other]:
        """These tables, whose arrays are there now."""
        sequences, before, tails, tiles = arrays
        return Tables(sequences, before, tails, tiles, self.num_drafted)


class Room(NamedTuple):
    """The sizes of the tables of all steps that have one shape."""

    sequences: int
    rows: int
    tiles: int
    num_drafted: int

    @classmethod
    def of(cls, layout: StateLayout, sequences: int, rows_each: int, *, trees: bool, drafts: bool) -> Room:
        """A sequence has at most a window and its rows behind its state. Without `drafts` none of these goes
        on behind a grid point.
        """
        places, grid = layout.window + rows_each, layout.grid
        tiles = ceil_div(places, grid)
        if trees:  # each row has a tile, behind those of its path
            tiles += rows_each * (1 + places // grid)
        return cls(sequences, sequences * rows_each, sequences * tiles, sequences if drafts else 0)


def tile_rows(grid: int) -> int:
    """That a tile has: what matrix units multiply, of which the grid's may be the first."""
    return power_of_two(grid)


def tables_of(
    spans: Sequence[RowSpan], bases: Sequence[int], layout: StateLayout, reach: int
) -> Tables[np.ndarray]:
    """Their states are at `bases`, and the convolutions read at most `reach` tokens back."""
    step = _Step(spans, bases, layout)
    before = step.sources(step.owner, step.place[:, None] + np.arange(-reach, 0))
    tails = step.sources(np.arange(len(spans)), step.settled[:, None] + np.arange(-reach, 0))
    chains = np.array([index for index, span in enumerate(spans) if span.masks is None], np.int64)
    tiles, counts = _chain_tiles(step, chains)
    begins = np.zeros(len(spans), np.int64)
    begins[chains] = np.cumsum(counts) - counts
    ends = begins.copy()
    ends[chains] += counts
    kept = step.first + np.maximum(step.settled - step.start, 0)
    for index, span in enumerate(spans):
        if span.masks is not None:
            _fill_paths(before, step, index, span, reach)
            own = _tree_tiles(step, index, span)
            begins[index], ends[index] = len(tiles), len(tiles) + len(own)
            tiles = np.concatenate([tiles, own])
            kept[index] = step.first[index]  # a row reads what others of its path have left there
    num_drafted = np.concatenate([[0], np.cumsum(tiles[:, 2] & DRAFTED)])
    crosses = (num_drafted[ends] > num_drafted[begins]).astype(np.int64)
    columns = step.state_slot, step.start, step.first, kept, step.first + step.end - step.start, begins, ends
    sequences = np.stack([*columns, np.cumsum(crosses) - crosses], 1)
    sequences, before, tails, tiles = (each.astype(np.int32) for each in (sequences, before, tails, tiles))
    return Tables(sequences, before, tails, tiles, int(crosses.sum()))


def padded(tables: Tables[np.ndarray], room: Room) -> Tables[np.ndarray]:
    """With the room's sizes. A sequence more has the rows that pad the step."""
    assert tables.num_drafted <= room.num_drafted
    lengths = room.sequences + 1, room.rows, room.sequences + 1, room.tiles
    arrays = []
    for length, array in zip(lengths, tables.arrays, strict=True):
        arrays.append(np.zeros((length, array.shape[1]), np.int32))
        arrays[-1][: len(array)] = array
    sequences, num_rows = arrays[0], len(tables.before)
    sequences[len(tables.sequences) :, 0] = NO_SEAT
    sequences[-1, 2:5] = num_rows, room.rows, room.rows  # first, kept, end
    return tables.on(arrays)._replace(num_drafted=room.num_drafted)


class _Step:
    """The spans' fields as columns; each row's span and place."""

    def __init__(self, spans: Sequence[RowSpan], bases: Sequence[int], layout: StateLayout) -> None:
        self.grid, self.window = layout.grid, layout.window
        fields = [(span.state_slot, span.start, span.count, span.certain) for span in spans]
        self.state_slot, self.start, counts, certain = np.array(fields, np.int64).reshape(-1, 4).T
        self.base = np.array(bases, np.int64)
        self.end = self.start + counts
        self.first = np.cumsum(counts) - counts
        self.settled = np.maximum(self.base, np.minimum(certain, self.end) // self.grid * self.grid)
        self.owner = np.repeat(np.arange(len(spans)), counts)
        self.place = np.arange(len(self.owner)) - (self.first - self.start)[self.owner]

    def sources(self, owner: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The sources of these places [n, m], each n's in one span."""
        start, base, first = (column[owner][:, None] for column in (self.start, self.base, self.first))
        slot_places = np.where(places >= base, -1 - places % self.window, places - base - self.window)
        return np.where(places >= start, first + places - start, slot_places)


def _chain_tiles(step: _Step, chains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All tiles of these spans, and how many each has."""
    grid, counts = step.grid, -(-(step.end - step.base)[chains] // step.grid)
    owner = np.repeat(chains, counts)
    point = step.base[owner] + grid * (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts))
    end = step.end[owner]
    places = point[:, None] + np.arange(tile_rows(grid))
    behind = np.minimum(point + grid, end)[:, None]
    sources = np.where(places < behind, step.sources(owner, places), NOTHING)
    settled = step.settled[owner]
    is_certain = point + grid <= settled
    flags = np.where(point + grid < end, ADVANCE, 0) | np.where(is_certain, ADVANCE | CERTAIN, 0)
    flags |= np.where(point > settled, DRAFTED, 0)
    bounds = [np.clip(edge - point, 0, grid) for edge in (step.start[owner], end)]
    return np.column_stack([*bounds, flags, sources]), counts


def _tree_tiles(step: _Step, index: int, span: RowSpan) -> np.ndarray:
    """A tile for each row, behind those that bring the state to where it is read."""
    grid, base = step.grid, int(step.base[index])
    tiles: list[tuple[int, int, int, list[int]]] = []
    passed: list[int] = []
    for place in range(span.start, span.start + span.count + 1):
        while base + grid <= min(place, span.certain):
            tiles.append((grid, grid, ADVANCE | CERTAIN, [*range(base, base + grid)]))
            base, passed = base + grid, []
        if place == span.start + span.count:
            break
        path = span.path(place, base)
        left = len(path) % grid
        ahead = path[: len(path) - left]
        if ahead and passed != ahead:
            for first in range(0, len(ahead), grid):
                drafted = DRAFTED if first else 0
                tiles.append((grid, grid, drafted | ADVANCE, ahead[first : first + grid]))
            passed = ahead
        tiles.append((left, left + 1, DRAFTED if ahead else 0, [*path[len(ahead) :], place]))
    table = np.full((len(tiles), TILE_COLUMNS + tile_rows(grid)), NOTHING, np.int64)
    for row, (low, high, flags, places) in zip(table, tiles, strict=True):
        row[:TILE_COLUMNS] = low, high, flags
        row[TILE_COLUMNS:][: len(places)] = step.sources(np.array([index]), np.array([places]))[0]
    return table


def _fill_paths(before: np.ndarray, step: _Step, index: int, span: RowSpan, reach: int) -> None:
    paths = [
        span.path(place, span.tree_start - reach)[-reach:] if reach else []
        for place in range(span.start, span.start + span.count)
    ]
    rows = slice(step.first[index], step.first[index] + span.count)
    before[rows] = step.sources(np.full(span.count, index), np.array(paths, np.int64).reshape(-1, reach))
