"""`deploy/install.sh` with a pip, and a uv, that only list what they would install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/bash
case "$*" in
    *"import torch; print"*) echo "${CUDA%%.*}" ;;
    *"import sys, torch"*) [ -n "$HAS_CUDA" ] ;;
    *"import torch"*) [ -n "$HAS_TORCH" ] ;;
    *sysconfig*) echo "$HEADERS" ;;
    *"pip config list"*) echo "$PIP_SETTINGS" ;;
    *"pip install"*) shift 5; echo "$1" >> "$LISTED.compiled"; shift; echo "$*" >> "$LISTED" ;;
esac
"""
UV = """#!/bin/bash
[ -z "$UV_FAILS" ] || exit 1
echo "$UV_DEFAULT_INDEX, $UV_INDEX: $*" >> "$LISTED.uv"
"""


def installed(folder: Path, *, has_gpu: bool = True, **variables: Any) -> tuple[list[str], str]:
    """Return what pip was asked to install in a checkout with an environment, and the output."""
    binaries = folder / ".venv/bin"
    binaries.mkdir(parents=True)
    (folder / "deploy").mkdir()
    shutil.copy(ROOT / "deploy/install.sh", folder / "deploy")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path, text in {
        binaries / "python": PYTHON,
        binaries / "uv": UV,
        folder / "nvidia-smi": f"#!/bin/bash\n{'echo GPU 0: NVIDIA H100' if has_gpu else 'exit 1'}\n",
    }.items():
        path.write_text(text)
        path.chmod(0o755)
    listed = folder / "listed"
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHON": "/bin/true",
        "LISTED": str(listed),
        "HEADERS": str(folder),
        **variables,
    }
    done = subprocess.run(
        [folder / "deploy/install.sh"], env=environment, capture_output=True, text=True, check=True
    )
    return listed.read_text().splitlines(), done.stdout


@pytest.mark.parametrize(("cuda", "nixl"), [("13.0", "nixl-cu13"), ("12.8", "nixl-cu12")])
def test_it_installs_torch_with_cuda_and_the_matching_nixl(tmp_path: Path, cuda: str, nixl: str) -> None:
    asked, _ = installed(tmp_path, CUDA=cuda)
    torch = next(line for line in asked if "torch==" in line)
    assert "+cpu" not in torch
    assert f"--no-deps nixl {nixl}" in asked


def test_a_torch_without_cuda_is_replaced(tmp_path: Path) -> None:
    asked, _ = installed(tmp_path, CUDA="13.0", HAS_TORCH="1")
    assert any(line.startswith("--force-reinstall torch==") for line in asked)


def test_a_torch_with_cuda_stays(tmp_path: Path) -> None:
    asked, _ = installed(tmp_path, CUDA="13.0", HAS_TORCH="1", HAS_CUDA="1")
    assert not any("torch==" in line for line in asked)


def test_uv_installs_from_pips_indexes(tmp_path: Path) -> None:
    settings = "global.extra-index-url='https://one\\nhttps://two'\n:env:.index-url='https://first'"
    asked, _ = installed(tmp_path, has_gpu=False, CUDA="12.8", PIP_SETTINGS=settings)
    assert asked == ["uv"]
    by_uv = (tmp_path / "listed.uv").read_text().splitlines()
    assert all(line.startswith("https://first, https://one https://two: pip install") for line in by_uv)
    assert [line.split()[-1].partition("==")[0] for line in by_uv] == ["torch", ".", "nixl-cu12"]


def test_pip_installs_what_uv_cannot(tmp_path: Path) -> None:
    asked, _ = installed(tmp_path, has_gpu=False, CUDA="12.8", UV_FAILS="1")
    assert [line.split()[-1].partition("==")[0] for line in asked] == ["uv", "torch", ".", "nixl-cu12"]


def test_an_existing_torchs_triton_is_accepted() -> None:
    """A PyTorch with CUDA needs one version of Triton. If pip refuses it, pip replaces PyTorch."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    triton = next(each for each in map(Requirement, extras["test"]) if each.name == "triton")
    of_torch = {"2.11": "3.6.0", "2.13": "3.7.1"}
    assert all(map(triton.specifier.contains, of_torch.values()))


@pytest.mark.parametrize(
    ("variables", "how"), [({}, "--no-compile"), ({"PYTHONDONTWRITEBYTECODE": "1"}, "--compile")]
)
def test_pip_compiles_where_python_does_not(tmp_path: Path, variables: dict[str, Any], how: str) -> None:
    installed(tmp_path, CUDA="13.0", **variables)
    assert set((tmp_path / "listed.compiled").read_text().split()) == {how}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="GCC is not installed")
def test_a_host_that_cannot_build_for_triton_is_reported(tmp_path: Path) -> None:
    assert "Triton needs GCC and Python's headers" in installed(tmp_path / "without", CUDA="13.0")[1]
    (tmp_path / "Python.h").touch()
    assert "Triton" not in installed(tmp_path / "with", CUDA="13.0", HEADERS=str(tmp_path))[1]


def test_an_environment_outside_the_checkout(tmp_path: Path) -> None:
    """Cluster hosts have one. This interpreter makes it without pip, so nothing is installed."""
    checkout, environment = tmp_path / "tandem", tmp_path / "tandem-venv"
    (checkout / "deploy").mkdir(parents=True)
    shutil.copy(ROOT / "deploy/install.sh", checkout / "deploy")
    shutil.copy(ROOT / "pyproject.toml", checkout)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nexec {sys.executable} "$@" --without-pip\n')
    python.chmod(0o755)
    variables: dict[str, Any] = {"PATH": os.environ["PATH"], "PYTHON": str(python), "VENV": str(environment)}
    done = subprocess.run(
        [checkout / "deploy/install.sh"], env=variables, capture_output=True, text=True, check=False
    )
    assert "install: pip finds no CPU build of PyTorch" in done.stderr
    assert (environment / "bin/python").exists() and (checkout / ".venv").resolve() == environment
