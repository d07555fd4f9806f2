from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.transports import cuda_driver
from tests.kvtransfer.transfer_sides import close_memories


@pytest.fixture(autouse=True)
def _memories_closed() -> Iterator[None]:
    yield
    close_memories()


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    """Return a function that registers an object to be closed after the test, and returns it."""
    opened: list[Any] = []

    def register(thing: Any) -> Any:
        opened.append(thing)
        return thing

    yield register
    for thing in reversed(opened):
        thing.close()


@pytest.fixture(scope="session")
def fake_cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a stand-in for CUDA's driver, with CUDA's header, which Triton has."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None or not shutil.which("g++"):
        pytest.skip("CUDA's header comes with Triton, and g++ compiles the driver")
    headers = Path(triton.origin).parent / "backends" / "nvidia" / "include"
    library = tmp_path_factory.mktemp("driver") / "libcuda.so"
    source = Path(__file__).parent / "fake_cuda.cpp"
    command = ["g++", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{headers}", str(source)]
    subprocess.run([*command, "-o", str(library)], check=True)
    return library


@pytest.fixture
def fake_cuda(fake_cuda_library: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace CUDA's driver. Its devices are the host's memory."""
    monkeypatch.setattr(cuda_driver, "LIBRARY", str(fake_cuda_library))
    return fake_cuda_library
