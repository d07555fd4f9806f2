"""Building, choosing and loading the CPU kernel, and the inputs that its Python side refuses."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.devices.attention import select_backend
from engine.devices.cpu.attention import backend as cpu_backend
from engine.devices.cpu.attention.backend import CpuBackend
from engine.devices.torch.attention import TorchBackend
from engine.kv.attention import AttentionOptions
from engine.kv.row_codes import CODE_DTYPES
from native import build
from tests.engine.attention_packs import make_pack, run

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
SOURCE = Path(cpu_backend.__file__).parent / "attention.cpp"
EMULATED = Path(__file__).parents[1] / "emulated" / "attention.cpp"
KERNELS = sorted(path for folder in ("engine", "native") for path in (ROOT / folder).rglob("*.cpp"))
PLAIN = AttentionOptions(1.0)
has_compiler = pytest.mark.skipif(
    cpu_backend.build_fault() is not None, reason="the CPU kernel needs a C++ compiler"
)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Start with an empty cache and without remembered choices."""
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    forget = (cpu_backend.load.cache_clear, cpu_backend.build_fault.cache_clear)
    for clear in forget:
        clear()
    yield tmp_path
    for clear in forget:
        clear()


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ in PATH")
def test_the_kernel_builds_if_there_is_a_compiler() -> None:
    """Otherwise every test of the kernel would be skipped unnoticed."""
    assert build.build(SOURCE).exists()


@has_compiler
def test_the_cpu_uses_the_kernel_and_other_dtypes_do_not() -> None:
    assert select_backend(CPU, torch.bfloat16)[0] is CpuBackend
    cls, reason = select_backend(CPU, torch.float16)
    assert cls is TorchBackend
    assert "float16" in reason
    cls, reason = select_backend(torch.device("cuda"), torch.float32)
    assert cls is TorchBackend
    assert "cuda" in reason


def test_requests_are_honoured_or_refused_by_name() -> None:
    assert select_backend(CPU, torch.float32, "torch")[0] is TorchBackend
    with pytest.raises(ValueError, match="cuda"):
        select_backend(torch.device("cuda"), torch.float32, "cpu")
    with pytest.raises(ValueError, match="'quick'"):
        select_backend(CPU, torch.float32, "quick")


def test_without_a_compiler_torch_serves_and_the_log_says_why(
    forgetful: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(forgetful))
    cls, reason = select_backend(CPU, torch.float32)
    assert cls is TorchBackend
    assert "no C++ compiler" in reason
    assert "no C++ compiler" in caplog.text
    with pytest.raises(ValueError, match="no C\\+\\+ compiler"):
        select_backend(CPU, torch.float32, "cpu")


def test_a_compiler_that_fails_leaves_nothing_behind(
    forgetful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = forgetful / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no luck today >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    cls, reason = select_backend(CPU, torch.float32)
    assert cls is TorchBackend
    assert "no luck today" in reason
    assert sorted(path.name for path in forgetful.iterdir()) == ["broken", "lock"]


def test_a_cache_that_cannot_be_written_is_reported(forgetful: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (forgetful / "file").touch()
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(forgetful / "file" / "cache"))
    with pytest.raises(build.BuildError, match=r"cache directory .* \(TANDEM_CACHE_DIR\): "):
        build.build(SOURCE)


def test_a_changed_header_or_another_cpu_makes_another_library(
    forgetful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a header in another folder, which another one includes."""
    compiler = forgetful / "compiler"
    compiler.write_text("#!/bin/sh\nexit 0\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for folder in ("kernel", "shared"):
        (forgetful / folder).mkdir()
    source, header = forgetful / "kernel" / "kernel.cpp", forgetful / "shared" / "inner.h"
    source.write_text('#include <vector>\n#include "outer.h"\n#include "../shared/inner.h"\n')
    (forgetful / "kernel" / "outer.h").write_text('#pragma once\n# include "../shared/inner.h"\n')
    (forgetful / "kernel" / "unused.h").write_text("int one;\n")
    header.write_text('#include "../kernel/outer.h"\nint one;\n')
    first = build.build(source)
    (forgetful / "kernel" / "unused.h").write_text("int two;\n")
    assert build.build(source) == first
    monkeypatch.setattr(build, "_cpu", lambda: "another CPU with the same home directory")
    second = build.build(source)
    header.write_text('#include "../kernel/outer.h"\nint two;\n')
    assert len({first, second, build.build(source)}) == 3


def test_processes_that_start_together_compile_once(forgetful: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes build all kernels: one compiles and shows progress in one line, the other waits."""
    compiler = forgetful / "compiler"
    compiler.write_text(f"#!/bin/sh\n[ $1 = --version ] || (sleep 0.2; echo $* >> {forgetful}/calls)\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(forgetful / "cache"))
    code = (
        "import logging; from native.build import *; logging.basicConfig(level='INFO');"
        f"build_all(Path({str(ROOT)!r}) / name for name in ('engine', 'kvtransfer', 'speculation'))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    lines = [line for process in started for line in process.communicate()[1].splitlines()]
    assert [process.returncode for process in started] == [0, 0]
    libraries = {path.stem.split("-")[0] for path in (forgetful / "cache").glob("*.so")}
    assert libraries >= {"attention", "product", "decoder", "choose", "chains", "gather"}
    assert len((forgetful / "calls").read_text().splitlines()) == len(libraries)
    assert len(lines) == 1
    assert all(name in lines[0] for name in libraries)


@pytest.mark.parametrize("spoilt", ["folder", "library"])
def test_libraries_that_others_can_write_are_not_loaded(
    spoilt: str, forgetful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "true")
    library = build.build(SOURCE)
    (library if spoilt == "library" else forgetful).chmod(0o777)
    with pytest.raises(build.BuildError, match="written by others"):
        build.build(SOURCE)


@has_compiler
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_portable_code_gives_the_same_attention(
    level: str, forgetful: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares the code for less capable CPUs with torch. -O3 makes no difference to it."""
    if platform.machine() != "x86_64" or (level.endswith("v4") and "avx512f" not in build._cpu()):
        pytest.skip(f"this CPU has no {level}")
    monkeypatch.setattr(build, "_FLAGS", [*build._FLAGS, "-O0"])  # takes a sixth of -O3's time
    monkeypatch.setattr(build, "_NATIVE", [f"-march={level}"])
    cases = [(torch.float32, "none", 2e-5), (torch.bfloat16, "none", 2e-2)]
    cases += [(dtype, name, 2e-2) for dtype in (torch.float32, torch.bfloat16) for name in CODE_DTYPES]
    for dtype, quantization, tolerance in cases:
        lengths = [(1, 300), (40, 90), (1, 17)]
        pack = make_pack(lengths, dtype=dtype, head_dim=72, quantization=quantization)
        settings: list[dict[str, Any]] = [{}, {"window": 50, "softcap": 5.0}]
        for arguments in settings:
            torch.testing.assert_close(
                run("cpu", pack, **arguments), run("torch", pack, **arguments), atol=tolerance, rtol=tolerance
            )


@has_compiler
@pytest.mark.parametrize("quantization", ["none", *CODE_DTYPES])
def test_emulated_tiles_give_the_same_attention(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the code for AMX with torch, and each sequence's rows with those it has alone."""
    monkeypatch.setattr(build, "_FLAGS", [*build._FLAGS, "-O1"])
    monkeypatch.setattr(build, "_NATIVE", ["-march=native", f"-I{EMULATED.parent}"])
    library = build.load_library(EMULATED)
    monkeypatch.setattr(cpu_backend, "load", lambda: library)
    lengths = [(1, 300), (9, 600), (90, 200), (24, 300)]
    shape: dict[str, Any] = {"dtype": torch.bfloat16, "quantization": quantization, "trees": True}
    settings: list[dict[str, Any]] = [{}, {"window": 50, "softcap": 5.0}]
    for arguments in settings:
        pack = make_pack(lengths, **shape)
        together = run("cpu", pack, **arguments)
        torch.testing.assert_close(together, run("torch", pack, **arguments), atol=2e-2, rtol=2e-2)
        alone = [
            run("cpu", make_pack([pair], first_seed=s, **shape), **arguments)
            for s, pair in enumerate(lengths)
        ]
        assert torch.equal(together, torch.cat(alone))


@has_compiler
@pytest.mark.parametrize("cpu", ["sapphirerapids", "cooperlake", "icelake-server", "znver3"])
@pytest.mark.parametrize("source", KERNELS, ids=lambda source: source.stem)
def test_kernels_compile_for_other_cpus(cpu: str, source: Path) -> None:
    """On this CPU, tests cannot run the instructions of all of them."""
    if platform.machine() != "x86_64":
        pytest.skip("another compiler has other names of CPUs")
    flags = [flag for flag in build._FLAGS if flag not in ("-O3", "-shared")]
    build._run([*build._compiler(), *flags, f"-march={cpu}", "-O0", "-fsyntax-only", str(source)])


@has_compiler
def test_no_second_openmp_runtime(threads_restored: None) -> None:
    """Two runtimes would bring two pools of threads that spin against each other."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc")
    torch.set_num_threads(2)
    run("cpu", make_pack([(64, 2000)]))
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = {Path(line.split()[-1]).name for line in maps if ".so" in line}
    assert len([name for name in names if name.startswith(("libgomp", "libiomp", "libomp"))]) == 1


@has_compiler
@pytest.mark.parametrize(
    ("field", "wrong"), [("block_table", 10_000), ("slot_mapping", 10**9), ("context_len", 10_000)]
)
def test_metadata_that_point_outside_the_pool_are_refused(field: str, wrong: int) -> None:
    pack = make_pack([(1, 20), (3, 30)])
    getattr(pack.metadata, field).view(-1)[0] = wrong
    with pytest.raises(ValueError, match=field):
        CpuBackend([pack.layer]).begin_step(pack.metadata)


@has_compiler
def test_tensors_that_do_not_fit_are_refused() -> None:
    pack = make_pack([(3, 30)])
    backend, (query, key, value) = CpuBackend([pack.layer]), pack.new
    with pytest.raises(RuntimeError, match="begin_step"):
        backend.forward(0, query, key, value, PLAIN)
    backend.begin_step(pack.metadata)
    for layer, given, message in (
        (0, (query, key[:2]), "key"),
        (0, (query[:, :3], key), "query"),
        (0, (query.bfloat16(), key), "float32"),
        (1, (query, key), "layer 1"),
    ):
        with pytest.raises(ValueError, match=message):
            backend.forward(layer, *given, value, PLAIN)
