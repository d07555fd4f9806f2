"""The corpus: the standard library of the running interpreter, split into training and held-out files.

As a script: writes the texts as JSONL, in the field "text", for `tandem speculate train`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
HELD_OUT_ONE_IN = 10

# Text that a person would not complete: other packages, generated tables, build settings, odd inputs.
EXCLUDED_PARTS = {"site-packages", "__pycache__", "encodings", "pydoc_data", "encoded_modules"}
EXCLUDED_PREFIXES = ("_sysconfigdata", "bad_", "badsyntax")


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: its path relative to the library's root, and its text."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is kept from all training. Only its name decides, so that every host agrees."""
        digest = hashlib.blake2b(self.name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0


def source_files(root: Path | None = None) -> Iterator[SourceFile]:
    """Yield the corpus in order of name; files that are not UTF-8 or (nearly) empty are left out.

    `root` defaults to the running interpreter's standard library.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED_PARTS & set(relative.parts) or relative.name.startswith(EXCLUDED_PREFIXES):
            continue
        if "lib2to3" in relative.parts and "data" in relative.parts:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) > 100:
            yield SourceFile(relative.as_posix(), text)


def training_texts() -> list[str]:
    """Return the texts of the training files."""
    return [file.text for file in source_files() if not file.held_out]


def held_out_files() -> list[SourceFile]:
    """Return the files that were never trained on."""
    return [file for file in source_files() if file.held_out]


class DocumentWindows:
    """An endless, seeded stream of batches of token windows over the training files.

    Each epoch joins the files in a new order, with the end-of-text token between them, cuts the result at a
    new offset into windows, and yields each window once, in random order. The stream depends only on the seed
    and the calls.
    """

    def __init__(self, documents: list[np.ndarray], separator: int, seed: int) -> None:
        self.documents = documents
        self.separator = np.array([separator], dtype=np.uint16)
        self.random = np.random.default_rng(seed)
        self.epoch = 0
        self.length = 0
        self.tokens = np.empty(0, dtype=np.uint16)
        self.starts = np.empty(0, dtype=np.int64)

    def _next_epoch(self, length: int) -> None:
        order = self.random.permutation(len(self.documents))
        parts = [part for index in order for part in (self.separator, self.documents[index])]
        self.tokens = np.concatenate(parts)
        starts = np.arange(self.random.integers(length), len(self.tokens) - length, length)
        self.starts = self.random.permutation(starts)
        self.length = length
        self.epoch += 1

    def next(self, batch: int, length: int) -> np.ndarray:
        """Return the next batch, int64 `[batch, length + 1]`. A new `length` begins a new epoch."""
        if length != self.length or len(self.starts) < batch:
            self._next_epoch(length)
        chosen, self.starts = self.starts[:batch], self.starts[batch:]
        return self.tokens[chosen[:, None] + np.arange(length + 1)].astype(np.int64)


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return each text's token ids, uint16."""
    return [np.array(encoding.ids, dtype=np.uint16) for encoding in tokenizer.encode_batch(texts)]


def write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("training", type=Path)
    parser.add_argument("held_out", type=Path)
    arguments = parser.parse_args()
    write(arguments.training, training_texts())
    write(arguments.held_out, [file.text for file in held_out_files()])


if __name__ == "__main__":
    main()
