"""Native code is built for each CPU and keeps memory; Python's mirrors of its structs are exact."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from native import build, ownership
from native.build import load_library
from native.process import freeze_heap
from native.structs import prototypes
from speculation.verification import native as verification
from speculation.weightless import ngram, suffix
from tests.engine.kernels import needs_kernel


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path / "cache")
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }\n')
    return source


@contextmanager
def locked_elsewhere(path: Path) -> Iterator[None]:
    ownership.own_folder(path.parent)
    lock = ownership.open_own(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    yield
    os.close(lock)


def test_a_stopped_process_that_has_the_lock_stops_no_build(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_LOCK_WAIT", 0.1)
    with locked_elsewhere(build.cache_dir() / "lock"):
        assert build.build(source).exists()


def test_a_wait_for_another_build_uses_some_cpu(source: Path) -> None:
    """A process without any CPU time for minutes would count as stuck."""
    waiting = threading.Thread(target=build.build, args=[source])
    with locked_elsewhere(build.cache_dir() / "lock"):
        waiting.start()
        clock = time.pthread_getcpuclockid(waiting.ident or 0)
        before = time.clock_gettime(clock)
        while time.clock_gettime(clock) < before + 0.001:
            assert waiting.is_alive()
            time.sleep(0.01)
    waiting.join()
    assert build.build(source).exists()


def test_a_frozen_heap_is_collected_again_except_for_its_objects() -> None:
    gc.disable()
    try:
        freeze_heap()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()


MIB = 1 << 20


def flags_of(address: int) -> list[str]:
    """Return the flags of the mapping that contains the address; none if it is not mapped."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            start, end = (int(each, 16) for each in name.split("-"))
            found = start <= address < end
        elif found and name == "VmFlags:":
            return values
    return []


@needs_kernel
def test_large_buffers_get_huge_pages_and_return_them_in_any_order() -> None:
    """The heap keeps freed memory below memory in use, and takes large blocks once one was freed."""
    library = load_library(Path(__file__).parent / "large_buffers.cpp")
    make, free = library.tandem_make_buffer, library.tandem_free_buffer
    free(make(5 * MIB), 5 * MIB)
    buffers = [make(3 * MIB) for _ in range(8)]
    assert all(buffer % (2 * MIB) == 0 and "hg" in flags_of(buffer) for buffer in buffers)
    for buffer in buffers[:-1]:
        ctypes.memset(buffer, 1, 3 * MIB)
        free(buffer, 3 * MIB)
        assert not flags_of(buffer)
    free(buffers[-1], 3 * MIB)


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
    path = tmp_path / "one.cpp"
    for kind in ("size_t", "uint8_t", "const float", "Settings"):
        path.write_text(f'extern "C" void tandem_one(const char* text, {kind} number) {{\n}}\n')
        with pytest.raises(AssertionError, match=f"tandem_one has types that Python does not know: .*{kind}"):
            list(prototypes(path))


def source_of(path: str) -> str:
    return re.sub(r"//.*", "", (ROOT / path).read_text())


def test_all_functions_get_types() -> None:
    for path in itertools.chain.from_iterable((ROOT / each).rglob("*.[ch]*") for each in FOLDERS):
        if path.suffix in (".cpp", ".h"):
            defined = re.findall(r"^\S[^/\n]*\b(tandem_\w+)\(", path.read_text(), re.M)
            assert [name for name, *_ in prototypes(path)] == defined, path


@pytest.mark.parametrize(("path", "name", "values"), ENUMS)
def test_enums_have_the_same_values(path: str, name: str, values: list[str]) -> None:
    found = re.search(rf"enum {name} : int64_t {{(.*?)}}", source_of(path), re.S)
    assert found is not None
    assert [each.split("=")[0].strip() for each in found[1].split(",")] == values
