"""Texts for training: files, windows and batches, and the model's own continuations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from models.training import continuations
from models.training.continuations import LONGEST, SHORTEST, beginnings, continued
from protocol.errors import ConfigError
from tests.speculation.eagle_files import VOCAB, write_target
from tests.speculation.tiny_trained import END, write_tiny_model
from training import recording
from training.data import Windows, encode_texts, read_texts


def test_texts_come_from_files_folders_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "deep" / "b.txt").write_text("two")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / "c.jsonl").write_text('{"text": "three"}\n\n{"text": "four", "id": 4}\n')
    assert sorted(read_texts(tmp_path)) == ["four", "one", "three", "two"]
    assert read_texts(tmp_path) == read_texts(tmp_path)
    assert read_texts(tmp_path / "a.py") == ["one"]
    assert sorted(read_texts(tmp_path / "c.jsonl")) == ["four", "three"]


def test_the_order_of_files_is_shuffled(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"text {number:02}")
    texts = read_texts(tmp_path)
    assert texts != sorted(texts)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.txt", b"\xff\xfe", "x.txt cannot be read as UTF-8"),
        ("x.txt", b" \n", "has no text"),
        ("x.jsonl", b'{"text": "a"}\nnope\n', "x.jsonl, line 2: not JSON"),
        ("x.jsonl", b'{"text": 3}\n', 'x.jsonl, line 1: has no string "text"'),
        ("x.jsonl", rb'{"text": "\ud83d"}', r"x.jsonl, line 1: has half of a character, '\\ud83d'"),
        ("x.jsonl", b"[]\n", 'x.jsonl, line 1: has no string "text"'),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_texts(tmp_path / name)
    with pytest.raises(ConfigError, match=r"--held-out: .*missing does not exist"):
        read_texts(tmp_path / "missing", "--held-out")


def test_texts_end_with_the_end_token(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    stream = encode_texts(["ab", "c"], tokenizer)
    assert stream.dtype == torch.int32
    assert stream.tolist() == [*tokenizer("ab").input_ids, END, *tokenizer("c").input_ids, END]


def test_each_epoch_has_every_window_once() -> None:
    windows = Windows(1000, length=16, batch=4, seed=1)
    epoch = torch.cat([windows[step] for step in range(windows.steps_per_epoch)])
    starts = sorted(epoch[:, 0].tolist())
    assert len(set(starts)) == len(starts) == windows.steps_per_epoch * 4
    assert len({start % 16 for start in starts}) == 1
    assert torch.equal(epoch, epoch[:, :1] + torch.arange(16))
    assert epoch.max() < 1000
    assert epoch[:, 0].tolist() != starts


def test_a_batch_depends_on_its_step_alone() -> None:
    first, second, other = (Windows(5000, 32, 4, seed) for seed in (1, 1, 2))
    per_epoch = first.steps_per_epoch
    in_order = [first[step] for step in range(2 * per_epoch)]
    assert torch.equal(second[per_epoch + 3], in_order[per_epoch + 3])
    assert torch.equal(second[2], in_order[2])
    assert not torch.equal(other[2], in_order[2])
    assert not torch.equal(in_order[per_epoch], in_order[0])


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="--data: has 100 tokens for training; a step takes 128"):
        Windows(100, 32, 4, 0)


def test_json_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(
        "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in ("a\nb", "ü\u2028x"))
    )
    assert sorted(read_texts(path)) == ["a\nb", "ü\u2028x"]


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
