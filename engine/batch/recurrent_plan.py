"""Tables of the sources of a step's inputs in recurrent layers, made on the host once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from engine.kv.state_slots import RowSpan, StateLayout
from engine.triton_support import ceil_div, power_of_two

Array = TypeVar("Array")
Other = TypeVar("Other")

NOTHING = -(2**31)
"""The source of an absent input. A source from 0 on is a row of the step. Other negative sources are in the
state slot: -1 - i is place i of its window; from -1 - window downwards follow the convolution's inputs before
the grid point, the latest first.
"""

SEQUENCE_COLUMNS = 8
"""The number of columns of a sequence: its state slot; its first row's place; its first row, the first row
that the window keeps and the end of its rows; its first tile and the end of its tiles; and its number among
the sequences whose drafts continue after a grid point. Ends are exclusive.
"""

NO_SLOT = -1
"""State slot of a sequence that pads the table. Its rows pad the step: they give zeros and keep nothing."""

TILE_COLUMNS = 3
"""The number of columns of a tile before its rows' sources: first new row, end of the new rows, flags."""

DRAFTED, ADVANCE, CERTAIN = 1, 2, 4
"""Flags of a tile. `DRAFTED`: its rows follow a state after draft tokens, not the state slot's. `ADVANCE`:
the state after its rows is computed. `CERTAIN`: the state slot gets that state.
"""


class Tables(NamedTuple, Generic[Array]):
    """Tables, all int32. A tile has the rows of one grid, each at its position modulo the grid: the new rows
    of a chain between two grid points, or the path to one new row of a tree.
    """

    sequences: Array
    """[sequences, SEQUENCE_COLUMNS]"""
    before: Array
    """[rows, reach]: sources of the inputs that a convolution reads before each row"""
    tails: Array
    """[sequences, reach]: sources of the inputs that a convolution will read before the new grid point"""
    tiles: Array
    """[tiles, TILE_COLUMNS + tile_rows(grid)]"""
    num_drafted: int
    """Number of sequences whose drafts continue after a grid point."""

    @property
    def arrays(self) -> list[Array]:
        return [self.sequences, self.before, self.tails, self.tiles]

    def on(self, arrays: Sequence[Other]) -> Tables[Other]:
        """Return these tables with other `arrays`, e.g. the ones that are on the device."""
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
        """Return the room for sequences that have at most a window and `rows_each` rows after their state.
        Without `drafts` no sequence's draft continues after a grid point.
        """
        places, grid = layout.window + rows_each, layout.grid
        tiles = ceil_div(places, grid)
        if trees:  # each row needs a tile of its own and one per grid point on its path
            tiles += rows_each * (1 + places // grid)
        return cls(sequences, sequences * rows_each, sequences * tiles, sequences if drafts else 0)


def tile_rows(grid: int) -> int:
    """Return the number of rows of a tile: at least `grid`, and a size that matrix units multiply."""
    return power_of_two(grid)


def tables_of(
    spans: Sequence[RowSpan], bases: Sequence[int], layout: StateLayout, reach: int
) -> Tables[np.ndarray]:
    """Return the tables of `spans` with states at `bases`; convolutions read at most `reach` tokens back."""
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
            kept[index] = step.first[index]  # a row reads inputs of its path in the window
    num_drafted = np.concatenate([[0], np.cumsum(tiles[:, 2] & DRAFTED)])
    crosses = (num_drafted[ends] > num_drafted[begins]).astype(np.int64)
    columns = step.state_slot, step.start, step.first, kept, step.first + step.end - step.start, begins, ends
    sequences = np.stack([*columns, np.cumsum(crosses) - crosses], 1)
    sequences, before, tails, tiles = (each.astype(np.int32) for each in (sequences, before, tails, tiles))
    return Tables(sequences, before, tails, tiles, int(crosses.sum()))


def padded(tables: Tables[np.ndarray], room: Room) -> Tables[np.ndarray]:
    """Pad tables to the room's sizes. One more sequence has the rows that pad the step."""
    assert tables.num_drafted <= room.num_drafted
    lengths = room.sequences + 1, room.rows, room.sequences + 1, room.tiles
    arrays = []
    for length, array in zip(lengths, tables.arrays, strict=True):
        arrays.append(np.zeros((length, array.shape[1]), np.int32))
        arrays[-1][: len(array)] = array
    sequences, num_rows = arrays[0], len(tables.before)
    sequences[len(tables.sequences) :, 0] = NO_SLOT
    sequences[-1, 2:5] = num_rows, room.rows, room.rows  # first, kept, end
    return tables.on(arrays)._replace(num_drafted=room.num_drafted)


class _Step:
    """The fields of spans as columns, and each row's span and place."""

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
        """Return the sources of `places` [n, m]; those in row i belong to span `owner[i]`."""
        start, base, first = (column[owner][:, None] for column in (self.start, self.base, self.first))
        slot_places = np.where(places >= base, -1 - places % self.window, places - base - self.window)
        return np.where(places >= start, first + places - start, slot_places)


def _chain_tiles(step: _Step, chains: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all tiles of the chains, and each chain's number of tiles."""
    grid, counts = step.grid, -(-(step.end - step.base)[chains] // step.grid)
    owner = np.repeat(chains, counts)
    point = step.base[owner] + grid * (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts))
    end = step.end[owner]
    places = point[:, None] + np.arange(tile_rows(grid))
    next_point = np.minimum(point + grid, end)[:, None]
    sources = np.where(places < next_point, step.sources(owner, places), NOTHING)
    settled = step.settled[owner]
    is_certain = point + grid <= settled
    flags = np.where(point + grid < end, ADVANCE, 0) | np.where(is_certain, ADVANCE | CERTAIN, 0)
    flags |= np.where(point > settled, DRAFTED, 0)
    bounds = [np.clip(edge - point, 0, grid) for edge in (step.start[owner], end)]
    return np.column_stack([*bounds, flags, sources]), counts


def _tree_tiles(step: _Step, index: int, span: RowSpan) -> np.ndarray:
    """Return a tile for each row, after the tiles that bring the state to where the row reads it."""
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
