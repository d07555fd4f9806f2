"""The host's work in a GPU decode step, with a device that computes nothing: scheduling, inputs, commits and
outputs.

Tests count calls and operators, because times differ between machines. The engine launches each step before
the one before it has finished, and replaying a graph costs nothing.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config

pytest.importorskip("triton", reason="Triton is for Linux")

from engine import assembly
from engine.batch.runner import Runner
from engine.batch.step_inputs import StepInputs
from engine.copies import Pinned, Uploader
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.runner import CudaRunner
from engine.devices.loaded_model import LoadedModel
from engine.engine import Engine
from engine.kv.pool import KVPool
from protocol.config import ServeConfig
from speculation.speculator import BatchSpeculator
from tests.engine.test_engine import ask

_CPU = torch.device("cpu")
_VOCABULARY = 512
"""Small, because the device chooses the tokens."""


class _Event:
    """The event of a finished copy."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True


class _HostUploader(Uploader):
    """Copies on the host, into memory that is not pinned."""

    def _new_buffer(self, nbytes: int) -> Pinned:
        event: Any = _Event()
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        return Pinned(buffer, buffer.numpy(), event)


class _Nothing:
    """A backend and a decoder that launch nothing."""

    name = "CUDA decoder"
    num_tables = 1
    operators = adapters = no_hidden = None
    hidden_of_all = False

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def plan(self, metadata: object) -> None: ...

    def begin_step(self, metadata: object) -> None: ...

    def forward(self, inputs: StepInputs) -> tuple[Tensor, None]:
        return torch.zeros(len(inputs.logit_rows), _VOCABULARY), None


def _runner(config: ServeConfig, loaded: LoadedModel, pool: KVPool, hidden_layers: tuple[int, ...]) -> Runner:
    nothing: Any = _Nothing(config.block_size)
    runner = CudaRunner(nothing, nothing, _CPU, "none", Buckets.of(config, loaded.max_model_len))
    runner._upload, runner._upload_bucket = _HostUploader(_CPU), _HostUploader(_CPU)
    return runner


MOST_CALLS = 60
"""Limit on calls of Python functions for each row. There were 35; 64 rows took 1.3 ms."""


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Yield the list of names of the Python functions called so far."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def decoding(folder: Path, sequences: int, context: int) -> Engine:
    """Return an engine whose sequences all decode since three steps."""
    config = Qwen3Config(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=_VOCABULARY,
        max_position_embeddings=600,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    options: dict[str, Any] = {"dtype": "float32", "compile": "off", "load_format": "dummy"}
    serve = ServeConfig(model=str(folder), device="cpu", max_num_seqs=sequences, max_model_len=600, **options)
    with patch.object(assembly, "runner_of_one_process", _runner):
        engine = Engine(serve, speculate=BatchSpeculator)
    engine._launcher._runs_ahead = True  # launches steps ahead, as on a GPU
    for number in range(sequences):
        prompt = [1 + (number + place) % 100 for place in range(context)]
        engine.add(ask(str(number), prompt, 12))
    while len(engine.step().outputs) < sequences:
        pass
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.running) == sequences
    return engine


def test_a_step_launches_as_many_operators_for_any_number_of_rows(tmp_path: Path) -> None:
    """The step's inputs come in one copy, except for the tokens, which stay on the device."""
    counts = []
    for sequences in (3, 24):
        engine = decoding(tmp_path, sequences, 20)
        with Operators() as operators:
            engine.step()
        counts.append(operators.counts)
    assert counts[0] == counts[1]
    assert counts[0]["copy_"] == 1


def test_a_row_takes_as_many_calls_after_any_context(tmp_path: Path) -> None:
    counts = {}
    for sequences, context in ((4, 20), (4, 400), (16, 20)):
        engine = decoding(tmp_path, sequences, context)
        with counted_calls() as calls:
            engine.step()
        counts[sequences, context] = len(calls)
    assert abs(counts[4, 400] - counts[4, 20]) < 4, "not one more for each row"
    assert counts[16, 20] - counts[4, 20] <= 12 * MOST_CALLS


def test_the_engine_steps_ahead_with_all_requests(tmp_path: Path) -> None:
    engine = decoding(tmp_path, 3, 20)
    assert engine.start_up["forward"] == "CUDA decoder, eager"
    assert engine._launcher.is_ahead
