"""Libraries that a server's processes must not import, since each needs megabytes and part of a start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.deploy.server_process import ROOT

FORBIDDEN = {
    "import deploy.launcher": "engine.engine gguf huggingface_hub ray requests torch transformers",
    "import deploy.actors": "engine fastapi jinja2 llguidance numpy tokenizers torch transformers uvicorn",
    "import router.preprocessing.process": "engine fastapi ray torch transformers uvicorn zmq",
    "from deploy.template.server import import_modules; import_modules()": (
        "fastapi nixl_cu12._bindings ray requests scipy sympy torch._decomp torch._inductor triton uvicorn"
    ),
    "import torch; from engine.devices.attention import select_backend; "
    "select_backend(torch.device('cpu'), torch.bfloat16, deterministic=False)": "triton torch._inductor",
}


@pytest.mark.parametrize("imports", FORBIDDEN, ids=["launcher", "actor", "preprocessor", "template", "cpu"])
def test_no_process_imports_what_it_does_not_need(imports: str) -> None:
    code = f"import sys; {imports}; print(*set({FORBIDDEN[imports]!r}.split()) & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr
