"""A parser of GGUF metadata that also finds the tensors' bytes.

ggml's docs/gguf.md specifies the format. The package `gguf` reads it too, but needs seconds to open a file:
it makes several Python objects for each token of the vocabulary.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from protocol.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The `struct` codes of the metadata's numeric types."""
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GgufError(ConfigError):
    """A GGUF file that cannot be read or served; the message names file, field or tensor, and reason."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in the file. `shape` has the outputs first, as in torch. `data` is uint8 [rows, bytes of a
    row], mapped from the file.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.need("general.architecture", str))

    def get(self, field: str, default: Any = None) -> Any:
        """Return a field of the architecture, such as `block_count` for `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{field}", default)

    def need(self, name: str, kind: type) -> Any:
        """Return a field of the metadata. Raises GgufError if it is missing or of another type."""
        value = self.metadata.get(name)
        if not isinstance(value, kind):
            self.fail(
                f"{name}: is {'missing' if value is None else type(value).__name__}, not {kind.__name__}"
            )
        return value

    def fail(self, reason: str) -> NoReturn:
        raise GgufError(f"{self.path}: {reason}")


def read_gguf(path: Path) -> GgufFile:
    """Read a file, and all other shards if it is the first of several. Raises GgufError."""
    first = _read_one(path)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return first
    if not isinstance(count, int):
        first.fail(f"split.count: is {count!r}, not a number")
    named = _SHARD.search(path.name)
    if named is None or int(named[1]) != 1 or int(named[2]) != count:
        first.fail(f"split.count: is {count}, so name the first shard, ...-00001-of-{count:05}.gguf")
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        shard = path.with_name(f"{path.name[: named.start()]}-{number:05}-of-{count:05}.gguf")
        tensors |= _read_one(shard).tensors
    return GgufFile(path, first.metadata, tensors)


def _read_one(path: Path) -> GgufFile:
    try:
        content = np.memmap(path, dtype=np.uint8, mode="c")  # copy-on-write: torch warns of read-only memory
    except (OSError, ValueError) as error:
        raise GgufError(f"{path}: cannot be read: {error}") from error
    return _Parser(path, content).parse()


class _Parser:
    def __init__(self, path: Path, content: np.ndarray) -> None:
        self._path = path
        self._content = content
        self._view: memoryview = content.data
        self._place = 0
        self._reading = "the header"

    def parse(self) -> GgufFile:
        if bytes(self._view[:4]) != _MAGIC:
            self._fail(f"starts with {bytes(self._view[:4])!r}, not {_MAGIC!r}: it is no GGUF file")
        self._place = 4
        version = self._number("I")
        if version not in _VERSIONS:
            hint = "; it is big-endian" if version & 0xFFFF == 0 else ""
            self._fail(f"has GGUF version {version}, not 2 or 3{hint}")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            self._reading = "the metadata"
            self._reading = name = self._string()
            metadata[name] = self._value(self._number("I"))
        described = [self._describe() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            self._fail(f"general.alignment: is {alignment!r}, not a positive number")
        start = -(-self._place // alignment) * alignment
        tensors = {name: self._tensor(name, shape, kind, start + at) for name, shape, kind, at in described}
        return GgufFile(self._path, metadata, tensors)

    def _describe(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a tensor's name, shape, type and offset among the tensors' bytes."""
        self._reading = "the list of tensors"
        self._reading = name = self._string()
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            self._fail(f"tensor {name}: has {num_dimensions} dimensions, not 1 to {_MOST_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        try:
            type = GGMLQuantizationType(kind)
        except ValueError:
            self._fail(f"tensor {name}: has type {kind}, which the package gguf does not know")
        values, num_bytes = GGML_QUANT_SIZES[type]
        if 0 in shape or shape[-1] % values:
            self._fail(
                f"tensor {name}: has shape {list(shape)}, which blocks of {values} do not fill ({type.name})"
            )
        row = shape[-1] // values * num_bytes
        rows = 1
        for length in shape[:-1]:
            rows *= length
        end = start + rows * row
        if end > len(self._content):
            size = len(self._content)
            self._fail(f"tensor {name}: ends at byte {end}, but the file has only {size}: it is truncated")
        return GgufTensor(name, type, shape, self._content[start:end].reshape(rows, row))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._number(self._code(kind))

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            self._fail(f"{self._reading}: has arrays in an array, which no model needs")
        code = self._code(kind)
        return list(struct.unpack(f"<{count}{code}", self._take(count * struct.calcsize(f"<{code}"))))

    def _code(self, kind: int) -> str:
        if kind not in _NUMBERS:
            self._fail(f"{self._reading}: has a value of type {kind}, which GGUF does not have")
        return _NUMBERS[kind]

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _strings(self, count: int) -> list[str]:
        """Read many strings, such as a vocabulary's tokens, in few calls each."""
        view, place, strings = self._view, self._place, []
        try:
            for _ in range(count):
                start = place + _LENGTH.size
                place = start + _LENGTH.unpack_from(view, place)[0]
                strings.append(str(view[start:place], "utf-8", "replace"))
        except (struct.error, OverflowError):
            place = len(view) + 1
        self._take(place - self._place)
        return strings

    def _string(self) -> str:
        return bytes(self._take(self._number("Q"))).decode("utf-8", "replace")

    def _take(self, num_bytes: int) -> memoryview:
        end = self._place + num_bytes
        if end > len(self._view):
            self._fail(f"ends at byte {len(self._view)}, within {self._reading}: it is truncated")
        taken = self._view[self._place : end]
        self._place = end
        return taken

    def _fail(self, reason: str) -> NoReturn:
        raise GgufError(f"{self._path}: {reason}")
