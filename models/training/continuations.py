"""Writes prefixes of the training files with the model's own greedy continuations, as JSONL.

Draft heads learn from them, since heads draft the model's text, not people's.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from models.training.corpus import encode_documents, training_texts
from training.recording import SourceText, answer

SHORTEST, LONGEST, CONTINUATION = 32, 160, 160  # in tokens


def beginnings(documents: list[np.ndarray], count: int, seed: int) -> list[list[int]]:
    """Return `count` pieces of the documents. Longer documents are chosen proportionally more often."""
    random = np.random.default_rng(seed)
    documents = [document for document in documents if len(document) > LONGEST]
    lengths = np.array([len(document) for document in documents])
    picked = []
    for index in random.choice(len(documents), size=count, p=lengths / lengths.sum()):
        length = random.integers(SHORTEST, LONGEST + 1)
        start = random.integers(lengths[index] - length + 1)
        picked.append(documents[index][start : start + length].tolist())
    return picked


def continued(model: Path, prompts: list[list[int]]) -> Iterator[list[int]]:
    """Yield each prompt followed by the model's continuation, in the order in which they finish."""
    pieces = [SourceText(prompt, CONTINUATION + 1, ignores_end=True) for prompt in prompts]
    for _, text in answer(str(model), "auto", (0,), list(enumerate(pieces))):
        yield text.token_ids.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="model folder")
    parser.add_argument("output", type=Path)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts-only", action="store_true", help="write prefixes, for --prompts")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    prompts = beginnings(encode_documents(tokenizer, training_texts()), arguments.count, arguments.seed)
    texts = iter(prompts) if arguments.prompts_only else continued(arguments.model, prompts)
    field = "prompt" if arguments.prompts_only else "text"
    with arguments.output.open("w", encoding="utf-8") as file:
        for text in tqdm(texts, total=len(prompts)):
            file.write(json.dumps({field: tokenizer.decode(text)}) + "\n")


if __name__ == "__main__":
    main()
