"""Terminal tables that omit columns if the terminal is too narrow for all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_FILE_WIDTH = 200
_WRAPPED_WIDTH = 16
_GAP = 2


def output_console() -> Console:
    """Return a console on standard output. A pipe or a file has no width, so it gets all columns."""
    has_width = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if has_width else _FILE_WIDTH)


class FittedTable:
    """A table with `columns`. Those in `optional` are left out, first to last, until the rest fits.

    The `wrapped` column takes several lines if its text is long.
    """

    def __init__(
        self, *columns: str, optional: Sequence[str] = (), wrapped: str = "", title: str | None = None
    ) -> None:
        self._columns, self._optional, self._wrapped, self._title = columns, optional, wrapped, title
        self._rows: list[Sequence[str | Text]] = []

    @property
    def row_count(self) -> int:
        return len(self._rows)

    def add_row(self, *cells: str | Text) -> None:
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = list(range(len(self._columns)))
        for name in self._optional:
            if sum(map(self._width, kept)) + _GAP * (len(kept) - 1) <= options.max_width:
                break
            kept.remove(self._columns.index(name))
        table = Table(
            title=self._title, title_justify="left", box=None, pad_edge=False, padding=(0, _GAP, 0, 0)
        )
        for name in (self._columns[index] for index in kept):
            table.add_column(name, no_wrap=name != self._wrapped, overflow="fold")
        for row in self._rows:
            table.add_row(*(row[index] for index in kept))
        yield ""
        yield table

    def _width(self, index: int) -> int:
        name = self._columns[index]
        if name == self._wrapped:
            return _WRAPPED_WIDTH
        texts = [name, *(str(row[index]) for row in self._rows)]
        return max(map(cell_len, texts))
