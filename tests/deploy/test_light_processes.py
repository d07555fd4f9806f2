"""Libraries that a server's processes must not import, since each needs megabytes and part of a start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.deploy.server_process import ROOT

ROUTER = (
    "from models.bundled import BUNDLED_MODEL; from messaging.sockets import ClusterKeys; "
    "from protocol.config import ServeConfig; from router.server import RouterServer, build_app; "
    "from router.text.chat_template import ChatTemplate; "
    "server = RouterServer(ServeConfig(model=str(BUNDLED_MODEL), port=0), ClusterKeys.generate()); "
    "build_app(server.state); ChatTemplate('{{ messages }}', {}).render([]); server.close()"
)
FORBIDDEN = {
    "from deploy.cli import app; app(['serve', '--help'], standalone_mode=False)": (
        "fastapi ray torch transformers zmq"
    ),
    "import bench.cli": "ray scipy torch transformers",
    ROUTER: "engine opentelemetry.sdk ray torch transformers",
    "import deploy.launcher": "engine.engine gguf huggingface_hub ray requests torch transformers",
    "import deploy.actors": "engine fastapi jinja2 llguidance numpy tokenizers torch transformers uvicorn",
    "import router.preprocessing.process": "engine fastapi ray torch transformers uvicorn zmq",
    "from deploy.template.server import import_modules; import_modules()": (
        "fastapi nixl_cu12._bindings ray requests scipy sympy torch._decomp torch._inductor triton uvicorn"
    ),
    "import torch; from engine.devices.attention import select_backend; "
    "select_backend(torch.device('cpu'), torch.bfloat16, deterministic=False)": "triton torch._inductor",
}


@pytest.mark.parametrize(
    "imports",
    FORBIDDEN,
    ids=["help", "bench", "router", "launcher", "actor", "preprocessor", "template", "cpu"],
)
def test_no_process_imports_what_it_does_not_need(imports: str) -> None:
    heavy = FORBIDDEN[imports].split()
    code = f"import sys; {imports}; sys.exit(' '.join(set({heavy}) & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
