"""Puts a mutant into a running process: existing functions get the mutated code."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

Place = tuple[str, int]


def functions_of(files: Iterable[str]) -> dict[str, list[FunctionType]]:
    """Return the living functions of each of these files, named by their full paths."""
    found: dict[str, list[FunctionType]] = {file: [] for file in files}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in found:
            found[each.__code__.co_filename].append(each)
    return found


def replace(functions: Iterable[FunctionType], old: bytes, new: bytes, file: str) -> int:
    """Give the mutated code to the functions whose code differs between two texts of their file. Return their
    number.
    """
    before, after = (dict(_codes(compile(text, file, "exec", dont_inherit=True))) for text in (old, new))
    changed = {place: code for place, code in after.items() if before.get(place) != code}
    count = 0
    for function in functions:
        code = changed.get(_place(function.__code__))
        if code and code.co_freevars == function.__code__.co_freevars:
            function.__code__ = code
            count += 1
    return count


def _codes(code: CodeType) -> Iterator[tuple[Place, CodeType]]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield _place(each), each
            yield from _codes(each)


def _place(code: CodeType) -> Place:
    return code.co_qualname, code.co_firstlineno
