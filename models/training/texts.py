"""Texts as JSONL, one a line in the field "text".

As a script: writes the corpus so, for `tandem speculate train`.
"""

import argparse
import json
from pathlib import Path

from models.training.corpus import held_out_files, training_texts


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
