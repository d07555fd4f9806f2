"""The CUDA decoder without a GPU: see `interpreted/decoder.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_interpreted_decoder_is_what_transformers_computes() -> None:
    """In a process of its own: Triton is another one from its import on where it interprets."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "tests/engine/interpreted/decoder.py",
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
