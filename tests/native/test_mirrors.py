"""Python's mirrors of C++ structs and enums have the same fields and values in the same order."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.devices.cpu.attention import backend as attention
from engine.devices.cpu.decoder import native_model as decoder_structs
from engine.devices.cpu.recurrent import native as recurrent
from engine.linear import packed as linear_structs
from engine.linear.packed_quantized import FORMATS
from engine.lora import table as lora_structs
from engine.model.program import Activation, MixerKind, NormKind, Score
from engine.parallel import shared_ranks
from engine.sampler import native, noise, rows
from speculation.verification import native as verification
from speculation.weightless import ngram, suffix

ROOT = Path(__file__).parents[2]
MIRRORS: list[tuple[str, ModuleType, dict[str, str]]] = [
    ("engine/devices/cpu/attention/step.h", attention, {}),
    ("engine/devices/cpu/decoder/structs.h", decoder_structs, {}),
    ("engine/devices/cpu/recurrent/structs.h", recurrent, {}),
    ("engine/linear/quantized.h", linear_structs, {"QuantizedArgs": "Quantized"}),
    ("engine/linear/routed_rows.h", linear_structs, {"RoutedArgs": "RoutedRows"}),
    ("engine/lora/adapt.h", lora_structs, {}),
    ("engine/parallel/exchange.cpp", shared_ranks, {}),
    ("engine/sampler/chooser.h", rows, {}),
    ("engine/sampler/chooser.h", native, {"EditsArgs": "Edits"}),
    ("engine/sampler/choose.cpp", native, {"LogitsArgs": "Logits", "DraftedArgs": "Drafted"}),
    ("speculation/verification/chains.cpp", verification, {}),
    ("speculation/weightless/repeats.h", ngram, {"TextBatch": "Batch"}),
    ("speculation/weightless/suffix.cpp", suffix, {"SuffixArgs": "Settings", "Ring": "Corpus"}),
]
"""C++ files, the modules that mirror their structs, and these by Python's name: by default all of the module,
without `Args`."""

STORED = [each.partition("_")[0].upper() for each in attention._STORED[1:]]
ENUMS: list[tuple[str, str, list[str]]] = [
    ("engine/devices/cpu/decoder/row_math.h", "Norm", [*NormKind.__members__]),
    ("engine/devices/cpu/decoder/row_math.h", "Activation", [*Activation.__members__]),
    ("engine/devices/cpu/decoder/structs.h", "Mixer", [*MixerKind.__members__]),
    ("engine/devices/cpu/decoder/routing.h", "Score", [*Score.__members__]),
    ("engine/devices/cpu/attention/step.h", "Stored", ["PLAIN", *STORED]),
    ("engine/linear/codes.h", "Format", [each.name for each in FORMATS]),
    ("engine/sampler/choice.h", "Purpose", [*noise.Purpose.__members__]),
]
KINDS: dict[str, Any] = {
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
SPELLED_OUT = {"inputs": "in", "outputs": "out"}
"""Python's names of fields whose C++ names are keywords or nearly so."""


def source(path: str) -> str:
    return re.sub(r"//.*", "", (ROOT / path).read_text())


def fields_of_cpp(path: str, name: str) -> list[tuple[str, str]]:
    """Return the names and kinds of a struct's fields: pointers, numbers, or structs by their name."""
    text = source(path)
    found = re.search(rf"struct {name} {{", text)
    assert found is not None, f"{path} has no struct {name}"
    depth, body = 1, ""
    for character in text[found.end() :]:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            break
        body += ";" if character == "}" else character if depth == 1 else ""
    fields = []
    for statement in body.split(";"):
        statement = re.sub(r"\(\*(\w+)\)\[\w+\]", r"*\1", statement)  # a pointer to arrays
        if "(" in statement or not (words := statement.replace("const", " ").split()):
            continue
        kind, declarators = words[0], " ".join(words[1:])
        for declarator in declarators.split(","):
            is_pointer = kind.endswith("*") or "*" in declarator
            fields.append((declarator.strip(" *"), "pointer" if is_pointer else kind.rstrip("*")))
    return fields


def structs_of(module: ModuleType) -> dict[str, str]:
    return {
        name: name.removesuffix("Args")
        for name, each in vars(module).items()
        if getattr(each, "__module__", "") == module.__name__ and hasattr(each, "_fields_")
    }


@pytest.mark.parametrize(
    ("path", "module", "name", "cpp"),
    [
        (path, module, name, cpp)
        for path, module, names in MIRRORS
        for name, cpp in (names or structs_of(module)).items()
    ],
)
def test_structs_have_the_same_fields(path: str, module: ModuleType, name: str, cpp: str) -> None:
    fields: Any = getattr(module, name)._fields_
    found = fields_of_cpp(path, cpp)
    assert len(fields) == len(found)
    for (field, kind), (told, told_kind) in zip(fields, found, strict=True):
        assert told in (field, SPELLED_OUT.get(field))
        if kind is ctypes.c_void_p:  # the addresses of functions have types of their own
            assert told_kind not in KINDS, field
        elif issubclass(kind, ctypes.Structure):
            assert kind.__name__ == f"{told_kind}Args"
        else:
            assert kind is KINDS.get(told_kind), field


@pytest.mark.parametrize(("path", "name", "values"), ENUMS)
def test_enums_have_the_same_values(path: str, name: str, values: list[str]) -> None:
    found = re.search(rf"enum {name} : int64_t {{(.*?)}}", source(path), re.S)
    assert found is not None
    assert [each.split("=")[0].strip() for each in found[1].split(",")] == values
