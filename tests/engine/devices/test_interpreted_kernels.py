"""Triton kernels without a GPU, compared with torch and Transformers (see `interpreted/`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is for Linux")
ROOT = Path(__file__).parents[3]
HERE = "tests/engine/interpreted"
GROUPS = {
    "attention": ["adapter_kernels", "adapters", "attention", "decoder", "ranks"],
    "layers": ["experts", "families", "graphs", "hybrid_graphs", "products", "recurrent", "routing"],
    "tokens": ["drafts", "flash", "library_products", "sampler", "trees", "verification"],
}
FILES = {name: [f"{HERE}/{kind}.py" for kind in kinds] for name, kinds in GROUPS.items()} | {
    "whole engines": [
        "tests/speculation/test_late_drafts.py",
        "tests/speculation/test_tree_drafting.py::test_the_drafts_kv_equals_that_of_committed_tokens[True]",
        "-k",
        "(tree and not medusa and (seeded or standard or block)) or True",
    ]
}
FASTER = "tests.engine.interpreted.faster"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("group", FILES)
def test_interpreted_kernels_compute_the_same(group: str) -> None:
    """They run in another process, since Triton decides on import whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", FASTER, *FILES[group]]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
