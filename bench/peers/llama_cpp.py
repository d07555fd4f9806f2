"""llama.cpp as a peer: its build, the conversion of a model folder to GGUF, and its server.

`python -m bench.peers.llama_cpp --home H --model FOLDER --type q8_0 -- FLAGS` converts the model, then runs
llama-server.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from checkpoints.source import is_gguf

GGUF_TYPES = ("bf16", "q8_0", "q4_0")

_PACKAGE = "llama-cpp-python"
_TARGETS = ("llama-server", "llama-quantize")
_FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_UI=OFF")

# GCC 12 assumes that ldtilecfg reads 8 bytes and drops the stores to the other 56: the first product then
# faults.
_TILE_SETUP = "_tile_loadconfig(&tc);"
_AFTER_STORES = 'asm volatile("" : : "r"(&tc) : "memory");'

# The script recognizes a tokenizer by its output for a text, and rejects our shapes' tokenizers, which do not
# change the speed. The script also imports SentencePiece, which these tokenizers do not need.
_CONVERT = """
import runpy, sys
sys.path[:0] = ["gguf-py", "."]
from conversion import base
def missing(self, *args, **kwargs):
    raise FileNotFoundError
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
base.TextModel._set_vocab_sentencepiece = missing
sys.argv[0] = "convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class LlamaCpp:
    """The sources and the build of llama.cpp in one folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._source = home / "source"
        self._build = home / "build"

    def install(self) -> None:
        """Build llama.cpp for this machine's CPU. An interrupted build resumes."""
        if not self._source.exists():
            self._download()
        subprocess.run(["cmake", "-G", "Ninja", "-S", self._source, "-B", self._build, *_FLAGS], check=True)
        subprocess.run(["cmake", "--build", self._build, "--target", *_TARGETS], check=True)

    def _download(self) -> None:
        """Download the newest source distribution of a package that contains llama.cpp."""
        with tempfile.TemporaryDirectory(dir=self.home) as folder:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*pip, "--dest", folder, _PACKAGE], check=True)
            (archive,) = Path(folder).glob("*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            (unpacked,) = Path(folder).glob("*/vendor/llama.cpp")
            amx = unpacked / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
            amx.write_text(amx.read_text().replace(_TILE_SETUP, f"{_AFTER_STORES} {_TILE_SETUP}"))
            unpacked.rename(self._source)

    def check_installed(self) -> None:
        """Raise ValueError if a tool is missing."""
        for name in _TARGETS:
            if not self.tool(name).exists():
                raise ValueError(f"{self.tool(name)} is missing: run `tandem bench setup llama.cpp`")

    def tool(self, name: str) -> Path:
        return self._build / "bin" / name

    def gguf(self, model: Path, type: str) -> Path:
        """Return the model folder as GGUF with weights of this type, made at the first call and kept in
        `home`.
        """
        stamp = f"{model.resolve()} {(model / 'config.json').stat().st_mtime_ns}"
        folder = self.home / "models" / f"{model.name}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            plain = folder / "bf16.gguf"
            partial = folder / "partial.gguf"
            if not plain.exists():
                convert = [sys.executable, "-c", _CONVERT, str(model.resolve())]
                convert += ["--outtype", "bf16", "--outfile", str(partial)]
                subprocess.run(convert, cwd=self._source, check=True)
                partial.rename(plain)
            made = folder / f"{type}.gguf"
            if not made.exists():
                subprocess.run([self.tool("llama-quantize"), plain, partial, type], check=True)
                partial.rename(made)
        return made


def serve(
    flags: Annotated[list[str], typer.Argument(help="of llama-server")],
    home: Annotated[Path, typer.Option(help="its environment")],
    model: Annotated[Path, typer.Option(help="model folder or GGUF file")],
    type: Annotated[str, typer.Option(help=", ".join(GGUF_TYPES))],
) -> None:
    """Run llama-server with a model folder in `type`, or with a GGUF file as it is."""
    llama = LlamaCpp(home)
    server = llama.tool("llama-server")
    file = model if is_gguf(model.name) else llama.gguf(model, type)
    os.execv(server, [str(server), "-m", str(file), *flags])


if __name__ == "__main__":
    typer.run(serve)
