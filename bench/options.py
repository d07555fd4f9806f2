"""Parsing of options with several comma-separated values. An error names the option."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import typer

T = TypeVar("T")


def parsed(flag: str, text: str, parse: Callable[[str], T]) -> list[T]:
    """Return the parsed values. Raises BadParameter if `parse` raises ValueError."""
    try:
        return [parse(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{flag}: {error}") from error


def counts(flag: str, text: str, most: int = 4096) -> list[int]:
    """Return distinct numbers in ascending order. Raises BadParameter if one is not within 1 to `most`."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise typer.BadParameter(f"{flag}: {text!r} is no list of whole numbers") from None
    if not 1 <= numbers[0] <= numbers[-1] <= most:
        raise typer.BadParameter(f"{flag}: {text!r} is not within 1 to {most}")
    return numbers


def chosen(flag: str, text: str, known: Sequence[T]) -> list[T]:
    """Return the named values in the order of `known`. Raises BadParameter if a name is not in `known`."""
    names = parsed(flag, text, str)
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{flag}: {name!r} is none of {', '.join(map(str, known))}")
    return [each for each in known if each in names]
