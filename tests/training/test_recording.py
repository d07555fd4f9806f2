"""Recordings: the engine's answers and hidden states, bounded and resumed on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from deploy.cli import app
from protocol.errors import ConfigError, TandemError
from tests.full_disk import REASON, full_disk
from tests.speculation.tiny_trained import VOCAB_SIZE
from tests.training.recorded import continued, hidden_states
from training.data import read_prompts
from training.heads.contract import Target
from training.output import only_run
from training.recording import Recorded, Recording, SourceText, answer, check_room

WIDTH = 4


def test_answers_and_hidden_states_are_the_models(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    target = Target("tiny", model, torch.zeros(VOCAB_SIZE))
    prompts = [[5, 6, 7], list(range(20, 60)), [9]]
    pieces = [SourceText(prompt, 12, ignores_end=True) for prompt in prompts] + [SourceText([3, 4, 5])]
    found = dict(answer(str(folder), "cpu", (1, 2), list(enumerate(pieces))))
    for number, prompt in enumerate(prompts):
        whole = continued(target, torch.tensor([prompt]), 12)
        assert found[number].token_ids.tolist() == whole[0, :-1].tolist()
        assert found[number].prompt_length == len(prompt)
        expected = hidden_states(target, whole[:, :-1], (1, 2))[0]
        torch.testing.assert_close(found[number].hidden.float(), expected, rtol=0.02, atol=0.02)
    assert found[3].token_ids.tolist() == [3, 4, 5]
    assert len(found[3].hidden) == found[3].prompt_length == 3


def texts(first: int = 0) -> Iterator[tuple[int, Recorded]]:
    for number in range(first, 5):
        tokens = torch.arange(3 + number)
        yield number, Recorded(tokens, torch.full((len(tokens), WIDTH), float(number)).bfloat16(), 2)


def test_answers_may_take_any_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_year = time.monotonic() + 3e7
    monkeypatch.setattr(time, "monotonic", lambda: in_a_year)
    ((_, text),) = answer(str(folder), "cpu", (1,), [(0, SourceText([5, 6, 7], 4, ignores_end=True))])
    assert len(text.token_ids) == 6


def ignore(*_: int) -> None:
    pass


def content(recording: Recording) -> list[tuple[Tensor, Tensor, int]]:
    return [(text.token_ids, text.hidden, text.prompt_length) for text in recording]


def test_a_recording_that_was_cut_off_is_resumed(tmp_path: Path) -> None:
    whole = Recording(tmp_path / "whole", WIDTH, 2**20, {"model": "a"})
    whole.add(texts(), ignore)
    some = texts()
    cut = Recording(tmp_path / "cut", WIDTH, 2**20, {"model": "a"})
    cut.add((next(some) for _ in range(2)), ignore)
    for name in ("tokens", "hidden", "index.jsonl"):
        with (tmp_path / "cut" / name).open("ab") as file:
            file.write(b"half a text")
    resumed = Recording(tmp_path / "cut", WIDTH, 2**20, {"model": "a"})
    assert resumed.numbers == {0, 1}
    resumed.add(texts(2), ignore)
    resumed = Recording(tmp_path / "cut", WIDTH, 2**20, {"model": "a"})
    for one, other in zip(content(whole), content(resumed), strict=True):
        assert all(
            torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, other, strict=True)
        )
    assert resumed.token_counts(8).tolist() == [0, 0, 5, 4, 3, 2, 1, 0]
    with pytest.raises(ConfigError, match="is of a run with model 'a', this has 'b'"):
        Recording(tmp_path / "cut", WIDTH, 2**20, {"model": "b"})


def test_a_full_disk_is_named_and_its_recording_resumed(tmp_path: Path) -> None:
    recording, some = Recording(tmp_path, WIDTH, 2**20, {}), texts()
    with full_disk(60), pytest.raises(TandemError, match=f"{tmp_path} cannot be written: {REASON}"):
        recording.add(some, ignore)
    resumed = Recording(tmp_path, WIDTH, 2**20, {})
    assert resumed.numbers == recording.numbers == {0, 1}
    resumed.add(texts(2), ignore)
    assert Recording(tmp_path, WIDTH, 2**20, {}).numbers == {0, 1, 2, 3, 4}


def test_one_run_at_a_time_records(tmp_path: Path) -> None:
    recording = Recording(tmp_path, WIDTH, 2**20, {})
    with only_run(tmp_path, "--output"), pytest.raises(ConfigError, match="--recording: another run writes"):
        recording.add(texts(), ignore)
    recording.add(texts(), ignore)
    assert recording.numbers == {0, 1, 2, 3, 4}


def test_a_recording_is_bounded(tmp_path: Path) -> None:
    recording = Recording(tmp_path, WIDTH, 7 * 2 * WIDTH, {})
    recording.add(texts(), ignore)
    assert recording.numbers == {0, 1}
    assert recording.is_full
    check_room(tmp_path, [SourceText([1], 10**9)], 1000, most_bytes=1000)
    with pytest.raises(ConfigError, match=r"--recording: .* GiB free\. Give less data"):
        check_room(tmp_path, [SourceText([1], 10**9)], 10**6, most_bytes=2**60)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"text": "x"}', 'line 1: has neither a string "prompt" nor a list'),
        ('{"messages": [{"role": "user", "content": "x"}]}', "the model has no chat template"),
        ("", "has no prompt"),
        (r'{"prompt": "\ud83d"}', r"line 1: has half of a character, '\\ud83d'"),
    ],
)
def test_bad_prompts(folder: Path, tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_prompts(path, "--prompts", AutoTokenizer.from_pretrained(folder))


def test_prompts_are_put_into_the_chat_template(folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    plain = [tokenizer(text).input_ids for text in ("one", "two")]
    assert sorted(read_prompts(tmp_path / "a.txt", "--prompts", tokenizer)) == sorted(plain)
    tokenizer.chat_template = "{% for each in messages %}<{{ each.content }}>{% endfor %}"
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"prompt": "x"}))
    found = [tokenizer.decode(ids) for ids in read_prompts(tmp_path / "b.jsonl", "--prompts", tokenizer)]
    assert sorted(found) == ["<one><two>", "<x>"]


def test_heads_learn_the_models_answers(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"line {number}: the quick\n" for number in range(40)))
    command = ["speculate", "train", "--method", "medusa", "--model", str(folder), "--device", "cpu"]
    command += ["--prompts", str(prompts), "--answer-tokens", "40", "--length", "32", "--batch-tokens", "128"]
    command += ["--output", str(tmp_path / "heads"), "--recording", str(tmp_path / "recording")]
    printed = CliRunner().invoke(app, [*command, "--steps", "3"])
    assert printed.exit_code == 0, printed.output
    index = (tmp_path / "recording" / "training" / "index.jsonl").read_text().split("\n")
    assert len(index) == 38 + 1
    refused = CliRunner().invoke(app, [*command, "--data", str(prompts), "--output", str(tmp_path / "more")])
    assert "--data or --prompts: give one of them" in refused.output
