"""`--attention-backend sdpa`: chunks of prompts by a library's kernel, all else by the device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.devices.cpu.attention.backend import CpuBackend
from engine.devices.torch import attention
from engine.devices.torch.attention import TorchBackend
from engine.engine import Engine
from tests.e2e.architectures import write_model
from tests.engine.attention_packs import BACKENDS
from tests.engine.test_engine import ask, prompt_of, run, tiny_engine, tokens

pytestmark = pytest.mark.skipif("sdpa" not in BACKENDS, reason="the CPU kernel needs a C++ compiler")


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """The numbers of rows that each backend attends for at a time."""
    found: dict[str, set[int]] = {}
    for backend in (TorchBackend, CpuBackend):
        forward: Any = backend.forward

        def counted(self: Any, *args: Any, forward: Any = forward, **options: Any) -> Any:
            found.setdefault(self.name, set()).add(len(args[1]))
            return forward(self, *args, **options)

        monkeypatch.setattr(backend, "forward", counted)
    monkeypatch.setattr(attention, "LEAST_ROWS", 9)
    return found


def answers(engine: Engine) -> list[list[int]]:
    """Prompts in chunks beside rows that decode, and one that is found again."""
    prompts = [prompt_of(length, length) for length in (3, 150, 90)]
    for number, prompt in enumerate(prompts):
        engine.add(ask(str(number), prompt, 12))
    outputs = run(engine)
    engine.add(ask("again", prompts[1], 12))
    again = run(engine)["again"]
    assert again[0].cached_tokens == 144
    return [tokens(outputs[str(number)]) for number in range(3)] + [tokens(again)]


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss"])
def test_tokens_are_those_of_the_reference(
    model_type: str, rows: dict[str, set[int]], tmp_path: Path
) -> None:
    """With windows in tables of their own, and with sinks."""
    write_model(model_type, tmp_path)
    bounds: dict[str, Any] = {"max_num_batched_tokens": 40, "kv_cache_memory_bytes": 1 << 22}
    engines = [
        tiny_engine(tmp_path, attention_backend=name, compile="off", **bounds) for name in ("sdpa", "torch")
    ]
    assert engines[0].start_up["attention"] == "sdpa (requested)"
    rows.clear()  # those of warming up
    found = answers(engines[0])
    assert min(rows["torch"]) >= 9
    assert max(rows["cpu"]) <= 8 + 2  # a short chunk, beside two sequences that decode
    assert found == answers(engines[1])
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_a_server_promises_no_equal_bits(model_type: str, tmp_path: Path) -> None:
    """With one block table and with several. Its kernel sums a chunk in an order of the library's choice."""
    write_model(model_type, tmp_path)
    for backend, promised in (("cpu", "yes"), ("sdpa", "no")):
        engine = tiny_engine(tmp_path, attention_backend=backend, dtype="bfloat16", compile="off")
        assert engine.start_up["deterministic"] == promised
        engine.close()
