"""Python knows the types of all C++ functions, and its enums have the values of C++'s in the same order."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from engine.devices.cpu.attention import backend as attention
from engine.linear.packed_quantized import FORMATS
from engine.model.program import Activation, MixerKind, NormKind, Score
from engine.sampler import noise
from native.structs import prototypes

ROOT = Path(__file__).parents[2]
FOLDERS = "engine", "kvtransfer", "native", "speculation"
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


def test_all_functions_get_types() -> None:
    for path in itertools.chain.from_iterable((ROOT / each).rglob("*.[ch]*") for each in FOLDERS):
        if path.suffix in (".cpp", ".h"):
            defined = re.findall(r"^\S[^/\n]*\b(tandem_\w+)\(", path.read_text(), re.M)
            assert [name for name, *_ in prototypes(path)] == defined, path


@pytest.mark.parametrize(("path", "name", "values"), ENUMS)
def test_enums_have_the_same_values(path: str, name: str, values: list[str]) -> None:
    found = re.search(rf"enum {name} : int64_t {{(.*?)}}", source(path), re.S)
    assert found is not None
    assert [each.split("=")[0].strip() for each in found[1].split(",")] == values
