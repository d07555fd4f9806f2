"""Training the models: a stable split and stream of windows; a resumed run equals an unbroken one."""

import argparse
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from models.training import loop
from models.training.corpus import DocumentWindows, SourceFile, source_files, write
from models.training.loop import run, window_shape
from models.training.shapes import export
from models.training.train import distillation_loss, next_token_loss
from training.loop import Schedule

LIBRARY = {
    "json/decoder.py": "import re\n" * 20,
    "asyncio/locks.py": "import collections\n" * 20,
    "site-packages/other/code.py": "print('not of the library')\n" * 20,
    "encodings/cp437.py": "'\\u0020'\n" * 50,
    "short.py": "pass\n",
    "test/bad_coding.py": "x = 1\n" * 50,
}


def test_the_corpus_has_library_code_alone(tmp_path: Path) -> None:
    for name, text in LIBRARY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n" * 60)
    assert [file.name for file in source_files(tmp_path)] == ["asyncio/locks.py", "json/decoder.py"]


def test_the_held_out_tenth_is_stable() -> None:
    files = [SourceFile(f"package/module_{number}.py", "") for number in range(2000)]
    assert 160 < sum(file.held_out for file in files) < 240
    held_out = [file.name for file in files[:40] if file.held_out]
    assert held_out == [file.name for file in files[:40] if SourceFile(file.name, "changed").held_out]
    assert SourceFile("codecs.py", "").held_out
    assert not SourceFile("subprocess.py", "").held_out


def documents() -> list[np.ndarray]:
    """Return four files without a common token."""
    return np.split(np.arange(2, 752, dtype=np.uint16), [90, 290, 600])


def test_windows_repeat_with_the_seed_and_never_within_an_epoch() -> None:
    first, second, other = (DocumentWindows(documents(), 0, seed) for seed in (1, 1, 2))
    batches = [first.next(2, 32) for _ in range(9)]
    assert first.epoch == 1
    assert all(np.array_equal(batch, second.next(2, 32)) for batch in batches)
    assert not np.array_equal(batches[0], other.next(2, 32))
    rows = {row.tobytes() for batch in batches for row in batch}
    assert len(rows) == 18
    assert batches[0].shape == (2, 33)


def options(state: Path, **changes: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    loop.add_arguments(parser)
    arguments = parser.parse_args(["--state", str(state), "--steps", "6", "--decay-steps", "2"])
    arguments.batch_tokens, arguments.length, arguments.warmup_steps = 1024, 64, 2
    for name, value in changes.items():
        setattr(arguments, name, value)
    return arguments


def test_schedule(tmp_path: Path) -> None:
    arguments = options(tmp_path / "state")
    schedule = Schedule(arguments.steps, arguments.warmup_steps, arguments.decay_steps)
    assert [schedule.scale(step) for step in range(6)] == [0.5, 1, 1, 1, 1, 0.5]
    assert window_shape(3, arguments) == (16, 64)
    assert window_shape(4, arguments) == (1, 1024)


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "training_texts", list)
    monkeypatch.setattr(
        loop, "encode_documents", lambda tokenizer, texts: [d for d in documents() for _ in range(4)]
    )
    unbroken, broken, resumed = tiny(), tiny(), tiny()
    tokenizer = Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    before = unbroken.lm_head.weight.clone()
    run(unbroken, lambda tokens: next_token_loss(unbroken, tokens), tokenizer, options(tmp_path / "a"))
    state = tmp_path / "b"
    run(
        broken,
        lambda tokens: next_token_loss(broken, tokens),
        tokenizer,
        options(state, steps=3, decay_steps=0),
    )
    run(resumed, lambda tokens: next_token_loss(resumed, tokens), tokenizer, options(state))
    assert not torch.equal(before, unbroken.lm_head.weight)
    for name, parameter in unbroken.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


def test_a_run_may_learn_from_texts_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def encoded(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
        seen.append(texts)
        return [d for d in documents() for _ in range(4)]

    monkeypatch.setattr(loop, "encode_documents", encoded)
    path = tmp_path / "texts.jsonl"
    write(path, ["one\n", "two\u2028 lines"])
    model, tokenizer = tiny(), Tokenizer.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    arguments = options(tmp_path / "state", steps=1, decay_steps=0, texts=path)
    run(model, lambda tokens: next_token_loss(model, tokens), tokenizer, arguments)
    assert [sorted(texts) for texts in seen] == [["one\n", "two\u2028 lines"]]


def test_distillation_loss_is_the_divergence_from_the_target() -> None:
    model, ids = tiny(), torch.arange(2, 34)[None]
    own = model(input_ids=ids).logits.detach()
    assert distillation_loss(model, own, ids).item() == pytest.approx(0, abs=1e-6)
    assert distillation_loss(model, own.flip(-1) * 3, ids).item() > 1e-4


def test_export_loads_as_bf16(tmp_path: Path) -> None:
    model = tiny()
    export(model, tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
