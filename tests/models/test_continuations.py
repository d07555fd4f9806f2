"""Training texts for draft heads: pieces of files, and the model's continuations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.training import continuations
from models.training.continuations import LONGEST, SHORTEST, beginnings, continued
from tests.speculation.eagle_files import VOCAB, write_target
from training import recording


def test_prompts_are_drawn_from_files_in_proportion_to_their_length() -> None:
    documents = [np.arange(start, start + length) for start, length in ((0, 50), (1000, 1000), (3000, 4000))]
    pieces = beginnings(documents, 400, seed=1)
    assert pieces == beginnings(documents, 400, seed=1) != beginnings(documents, 400, seed=2)
    assert all(SHORTEST <= len(piece) <= LONGEST for piece in pieces)
    assert {SHORTEST, LONGEST} <= {len(piece) for piece in pieces}
    assert all(piece == list(range(piece[0], piece[0] + len(piece))) for piece in pieces)
    assert all(1000 <= piece[0] < piece[-1] < 2000 or 3000 <= piece[0] < piece[-1] < 7000 for piece in pieces)
    assert 0.7 < np.mean([piece[0] >= 3000 for piece in pieces]) < 0.9


def test_each_prompt_is_continued_by_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuations, "CONTINUATION", 12)
    monkeypatch.setattr(recording, "AT_ONCE", 4)
    write_target(tmp_path)
    random = np.random.default_rng(0)
    prompts = [random.integers(1, VOCAB, size=length).tolist() for length in (3, 9, 4) * 3]
    texts = list(continued(tmp_path, prompts))
    found = sorted((text[:-12], text[-12:]) for text in texts)
    assert [prompt for prompt, _ in found] == sorted(prompts)
    (alone,) = continued(tmp_path, prompts[:1])
    assert alone in texts
