"""Triton kernels without a GPU: they are chosen, and compile for GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import triton_support
from engine.devices.attention import backend_of, select_backend
from engine.devices.torch.attention import TorchBackend

pytest.importorskip("triton", reason="Triton is for Linux")
CUDA = torch.device("cuda")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_support, "can_build", lambda: True)


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_uses_triton() -> None:
    cls, reason = select_backend(CUDA, torch.bfloat16)
    assert cls is backend_of("triton")
    assert reason == "reads the KV blocks in place"
    assert select_backend(CUDA, torch.float16)[0] is cls
    for name in ("sdpa", "torch"):
        assert select_backend(CUDA, torch.bfloat16, name)[0] is backend_of(name)


def test_calls_that_launch_kernels_can_be_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    (tmp_path / "gcc").touch(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(triton_support.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert triton_support.can_build()
    (tmp_path / "gcc").unlink()
    assert not triton_support.can_build()
    monkeypatch.setenv("CC", "clang-18")
    assert triton_support.can_build()
    (tmp_path / "Python.h").unlink()
    assert not triton_support.can_build()


@pytest.mark.usefixtures("a_gpu")
def test_models_that_triton_does_not_support_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cls, reason = select_backend(CUDA, torch.float64)
    assert cls is TorchBackend
    assert "torch.float64" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "not 7.5" in select_backend(CUDA, torch.float16)[1]
    monkeypatch.setattr(triton_support, "can_build", lambda: False)
    assert "a C compiler and Python's headers" in select_backend(CUDA, torch.float16)[1]
    monkeypatch.setattr(triton_support.importlib.util, "find_spec", lambda name: None)
    assert "package triton" in select_backend(CUDA, torch.float16)[1]
    for name in ("triton", "sdpa"):
        with pytest.raises(ValueError, match=rf"attention backend '{name}': .* package triton"):
            select_backend(CUDA, torch.float16, name)
    with pytest.raises(ValueError, match="does not run on cpu"):
        select_backend(torch.device("cpu"), torch.float32, "triton")
