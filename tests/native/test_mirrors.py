"""Python's mirrors of C++ structs and enums have the same fields and values in the same order."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.devices.cpu.attention import backend as attention
from engine.linear.packed_quantized import FORMATS
from engine.lora import table as lora_structs
from engine.model.program import Activation, MixerKind, NormKind, Score
from engine.parallel import shared_ranks
from engine.sampler import native, noise, rows
from native.structs import fields
from speculation.verification import native as verification
from speculation.weightless import ngram, suffix

ROOT = Path(__file__).parents[2]
MIRRORS: list[tuple[str, ModuleType, dict[str, str]]] = [
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


def source(path: str) -> str:
    return re.sub(r"//.*", "", (ROOT / path).read_text())


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
    mirror: Any = getattr(module, name)
    inner = [kind for _, kind in mirror._fields_ if issubclass(kind, ctypes.Structure)]
    assert list(mirror._fields_) == fields(ROOT / path, cpp, *inner)


@pytest.mark.parametrize(("path", "name", "values"), ENUMS)
def test_enums_have_the_same_values(path: str, name: str, values: list[str]) -> None:
    found = re.search(rf"enum {name} : int64_t {{(.*?)}}", source(path), re.S)
    assert found is not None
    assert [each.split("=")[0].strip() for each in found[1].split(",")] == values
