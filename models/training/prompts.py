"""Writes held-out prompts with their true continuations, for benchmarks: one JSON object a line."""

import argparse
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from models.training.corpus import held_out_files

SHORTEST, LONGEST, CONTINUATION = 50, 600, 128
CREDIT = "CPython standard library, (c) Python Software Foundation, PSF License Version 2"


def prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[dict[str, str | int]]:
    """Pick `count` prompts of 50 to 600 tokens, each starting at a line of its own held-out file."""
    random = np.random.default_rng(seed)
    files = [file for file in held_out_files() if len(file.text) > 8000]
    chosen = random.choice(len(files), size=count, replace=count > len(files))
    picked: list[dict[str, str | int]] = []
    for index in sorted(chosen.tolist()):
        file = files[index]
        breaks = [at + 1 for at, character in enumerate(file.text) if character == "\n"]
        # the last third is kept free, so that prompt and continuation fit after the start
        start = breaks[int(random.integers(len(breaks) * 2 // 3))]
        ids = tokenizer.encode(file.text[start:]).ids
        length = min(int(random.integers(SHORTEST, LONGEST + 1)), max(SHORTEST, len(ids) - CONTINUATION))
        picked.append(
            {
                "file": file.name,
                "credit": CREDIT,
                "prompt_tokens": length,
                "prompt": tokenizer.decode(ids[:length]),
                "continuation": tokenizer.decode(ids[length : length + CONTINUATION]),
            }
        )
    return picked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="model folder, for its tokenizer")
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    lines = [json.dumps(prompt) for prompt in prompts(tokenizer, arguments.count, arguments.seed)]
    arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
