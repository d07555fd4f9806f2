"""The Triton kernels without a GPU: interpreted, chosen, and compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.attention import select
from engine.attention.select import available_backends, backend_of, select_backend
from engine.attention.torch_backend import TorchBackend

pytest.importorskip("triton", reason="Triton is for Linux")
ROOT = Path(__file__).parents[2]
CUDA = torch.device("cuda")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interpreted_kernels_are_what_torch_computes() -> None:
    """In a process of its own: Triton is another one from its import on where it interprets."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/engine/interpreted/attention.py",
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_is_served_by_triton() -> None:
    cls, reason = select_backend(CUDA, torch.bfloat16)
    assert cls is backend_of("triton")
    assert reason == "reads the KV blocks in place"
    assert available_backends(CUDA, torch.float16) == ["triton", "torch"]
    assert select_backend(CUDA, torch.bfloat16, "torch")[0] is TorchBackend


@pytest.mark.usefixtures("a_gpu")
def test_what_triton_cannot_serve_goes_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cls, reason = select_backend(CUDA, torch.float64)
    assert cls is TorchBackend
    assert "torch.float64" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "not 7.5" in select_backend(CUDA, torch.float16)[1]
    monkeypatch.setattr(select.importlib.util, "find_spec", lambda name: None)
    assert "package triton" in select_backend(CUDA, torch.float16)[1]
    with pytest.raises(ValueError, match=r"attention backend 'triton': .* package triton"):
        select_backend(CUDA, torch.float16, "triton")
    with pytest.raises(ValueError, match="does not run on cpu"):
        select_backend(torch.device("cpu"), torch.float32, "triton")
