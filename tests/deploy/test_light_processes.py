"""Processes import only what they need, and a killed one's directory is removed."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.processes import PrivateDirectory
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


CODE = """
import sys
from engine.light_imports import delay_kernels, with_kernels
delay_kernels()
from transformers import LlamaForCausalLM
print(*{"scipy", "sympy", "torch.distributed.tensor", "torch._dynamo.eval_frame"} & set(sys.modules))
import torch
for device in "cpu", "meta":
    with torch.device(device):
        torch.nn.Embedding(2, 2)  # calls a function that the compiler is not to see
        1 / 2 ** torch.arange(0, 8, 2)
kernels = sys.modules["torch._meta_registrations"]
print(*{"sympy", "torch._decomp"} & set(sys.modules))
@with_kernels
def choose(device):
    with torch.device(device):
        return torch.where(torch.ones(2) > 0, 1.0, torch.zeros(2))
choose("cpu")
print(type(kernels).__name__)
choose("meta")
print(type(kernels).__name__)
seen = []
def backend(graph, inputs):
    seen.append(graph)
    return graph.forward
torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
print(len(seen), torch._dynamo.config is sys.modules["torch._dynamo.config"])
"""


def test_model_classes_bring_no_compiler_until_it_is_used():
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.returncode) == ("\n\n_LateModule\nmodule\n1 True\n", 0), done.stderr


OWNER = "from deploy.processes import PrivateDirectory; print(PrivateDirectory().path, flush=True); input()"


@pytest.fixture
def own() -> Iterator[PrivateDirectory]:
    directory = PrivateDirectory()
    yield directory
    directory.remove()


def test_the_directory_is_private(own: PrivateDirectory) -> None:
    assert own.path.stat().st_mode & 0o777 == 0o700
    own.remove()
    assert not own.path.exists()


def test_a_killed_owners_directory_is_removed_and_a_living_ones_stays(own: PrivateDirectory) -> None:
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    paths = []
    for owner in owners:
        assert owner.stdout is not None
        paths.append(Path(owner.stdout.readline().strip()))
    owners[0].kill()
    owners[0].wait()
    later = PrivateDirectory()
    assert [path.exists() for path in paths] == [False, True]
    assert own.path.exists()
    later.remove()
    owners[1].communicate("\n")
    PrivateDirectory().remove()
    assert not paths[1].exists()


def test_a_users_files_are_left_alone(own: PrivateDirectory) -> None:
    """The name looks like ours, but its number belongs to no process and proves nothing."""
    theirs = own.path.parent / f"tandem-{2**30}-{uuid.uuid4().hex}"
    theirs.mkdir()
    (theirs / "results.json").write_text("{}")
    try:
        PrivateDirectory().remove()
        assert (theirs / "results.json").read_text() == "{}"
    finally:
        (theirs / "results.json").unlink()
        theirs.rmdir()
