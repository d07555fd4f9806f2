"""Python's structs lie in memory like C++'s, Python knows the types of all C++ functions, and its enums have
the values of C++'s in the same order.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest

from engine.devices.cpu.attention import backend as attention
from engine.devices.cpu.decoder import native_model
from engine.devices.cpu.recurrent import native as recurrent
from engine.linear import packed
from engine.linear.packed_quantized import FORMATS
from engine.lora import table as lora
from engine.model.program import Activation, MixerKind, NormKind, Score
from engine.parallel import group
from engine.sampler import native as sampler
from engine.sampler import noise, rows
from native import build
from native.structs import prototypes
from speculation.verification import native as verification
from speculation.weightless import ngram, suffix
from tests.engine.kernels import needs_kernel

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
MIRRORS: list[tuple[str, ModuleType]] = [
    ("engine/devices/cpu/attention/step.h", attention),
    ("engine/devices/cpu/decoder/structs.h", native_model),
    ("engine/devices/cpu/recurrent/structs.h", recurrent),
    ("engine/linear/product.cpp", packed),
    ("engine/lora/adapt.h", lora),
    ("engine/parallel/exchange.cpp", group),
    ("engine/sampler/choose.cpp", sampler),
    ("engine/sampler/chooser.h", rows),
    ("speculation/verification/chains.cpp", verification),
    ("speculation/weightless/repeats.h", ngram),
    ("speculation/weightless/suffix.cpp", suffix),
]
CPP_NAMES = {"TextBatch": "Batch", "SuffixArgs": "Settings", "Ring": "Corpus"}
"""C++'s names, where they are not Python's without `Args`."""


@needs_kernel
@pytest.mark.parametrize(("path", "module"), MIRRORS)
def test_structs_lie_in_memory_like_those_of_the_compiler(
    path: str, module: ModuleType, tmp_path: Path
) -> None:
    lines = ["#include <cstddef>", f'#include "{ROOT / path}"']
    for name, mirror in vars(module).items():
        if not hasattr(mirror, "_fields_") or mirror.__module__ != module.__name__:
            continue
        cpp = CPP_NAMES.get(name, name.removesuffix("Args"))
        lines.append(f"static_assert(sizeof({cpp}) == {ctypes.sizeof(mirror)});")
        offsets = ((field, getattr(mirror, field).offset) for field, *_ in mirror._fields_)
        lines += [f"static_assert(offsetof({cpp}, {field}) == {offset});" for field, offset in offsets]
    assert len(lines) > 3
    (tmp_path / "layout.cpp").write_text("\n".join(lines))
    build._run(
        [*build._compiler(), *build._FLAGS, *build._NATIVE, "-fsyntax-only", str(tmp_path / "layout.cpp")]
    )


def test_types_that_python_does_not_know_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "one.cpp"
    for kind in ("size_t", "uint8_t", "const float", "Settings"):
        source.write_text(f'extern "C" void tandem_one(const char* text, {kind} number) {{\n}}\n')
        with pytest.raises(AssertionError, match=f"tandem_one has types that Python does not know: .*{kind}"):
            list(prototypes(source))


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
