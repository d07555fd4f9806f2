"""Python's mirrors of C++ structs and functions, with the fields and types that the sources give them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_KINDS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "unsigned": ctypes.c_uint,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_RESULTS = _KINDS | {"void": None, "const char*": ctypes.c_char_p}
_FUNCTIONS = "Parallel", "Function"
"""The C++ names of functions' addresses."""
_FUNCTION = re.compile(r'^(?:extern "C" )?((?:const )?\w+\*?) (tandem_\w+)\(([^)]*)\) {', re.M)


def fields(source: Path, name: str, *inner: type[ctypes.Structure]) -> list[tuple[str, Any]]:
    """Return the `_fields_` of a struct in a C++ file. `inner` are the mirrors of structs within, with `Args`
    after their names. Pointers and the addresses of functions become void pointers.
    """
    kinds = _KINDS | {each.__name__.removesuffix("Args"): each for each in inner}
    found = list(declared(source, name))
    unknown = [kind for _, kind in found if kind not in kinds and kind[0].islower() and kind[-1] != "*"]
    assert not unknown, f"{source}: {name} has fields without a mirror: {unknown}"
    return [(field, kinds.get(kind, ctypes.c_void_p)) for field, kind in found]


def declared(source: Path, name: str) -> Iterator[tuple[str, str]]:
    """Yield the names of a struct's fields and their types; a pointer's type ends in `*`."""
    text = re.sub(r"//.*", "", source.read_text())
    found = re.search(rf"struct {name} {{(.*?)\n}};", text, re.S)
    assert found is not None, f"{source} has no struct {name}"
    body = found[1]
    while "{" in body:
        body = re.sub(r"{[^{}]*}", ";", body)
    for statement in body.split(";"):
        statement = re.sub(r"\(\*(\w+)\)\[\w+\]", r"*\1", statement)  # a pointer to arrays
        words = statement.replace("const", " ").split()
        if not words or "(" in statement:
            continue  # a function
        for declarator in " ".join(words[1:]).split(","):
            is_pointer = words[0].endswith("*") or "*" in declarator
            yield declarator.split("=")[0].strip(" *"), words[0].rstrip("*") + "*" * is_pointer


def prototypes(source: Path) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the name of each function `tandem_...` of a C++ file, its result's type and its arguments' types.
    A `const char*` that it returns is text; other pointers, and addresses of functions, are void pointers.
    """
    for result, name, arguments in _FUNCTION.findall(re.sub(r"//.*", "", source.read_text())):
        words = [argument.split() for argument in arguments.split(",") if argument.strip()]
        given = [" ".join(each[:-1]) or each[0] for each in words]  # an argument may have no name
        known = _KINDS | dict.fromkeys(_FUNCTIONS, ctypes.c_void_p)
        unknown = [kind for kind in (result, *given) if kind[-1] != "*" and kind not in known | _RESULTS]
        assert not unknown, f"{source}: {name} has types that Python does not know: {unknown}"
        kinds = [known.get(kind, ctypes.c_void_p) for kind in given]
        yield name, _RESULTS.get(result, ctypes.c_void_p), kinds
