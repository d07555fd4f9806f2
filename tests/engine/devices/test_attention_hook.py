"""Transformers' attention hook, and the backends that devices and models get."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, masking_utils

from engine import triton_support
from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import backend_of, select_backend
from engine.devices.torch import transformers_hook
from engine.devices.torch.attention import TorchBackend
from engine.devices.torch.runner import Modules, TorchRunner
from engine.kv.attention import AttentionBackend, LayerKv
from protocol.errors import UnsupportedModelError
from tests.e2e.architectures import ARCHITECTURES, config_of
from tests.engine.attention_packs import BACKENDS

BLOCK_SIZE, BLOCKS_EACH, LENGTHS = 4, 16, [17, 31, 20]

UNLIKE = ("gemma3n_text", "gemma4_text", "mimo_v2_flash", "deepseek_v3")
"""Models in which some layers' KV has another shape."""


def build(architecture: str, attention: str = transformers_hook.NAME, **changes: Any) -> PreTrainedModel:
    transformers_hook.register()
    torch.manual_seed(0)
    window = {"sliding_window": 6} if ARCHITECTURES[architecture].get("sliding_window") else {}
    config = config_of(architecture, **window | changes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():
        # with the usual initialization, attention is nearly uniform and hides mistakes
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def backend_for(model: PreTrainedModel, name: str) -> AttentionBackend:
    config = model.config
    heads = config.num_attention_heads
    kv_heads = heads if config.model_type in ("gpt2", "gpt_neox", "opt") else config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = (1 + len(LENGTHS) * BLOCKS_EACH, config.num_hidden_layers, 2, BLOCK_SIZE, kv_heads, head_dim)
    cls, _ = select_backend(torch.device("cpu"), torch.float32, name)
    return cls([LayerKv.of(layer) for layer in torch.full(shape, float("nan")).unbind(1)])


def packed_logits(model: Any, backend: AttentionBackend, tokens: list[list[int]]) -> list[Tensor]:
    """Return the logits of every sequence: its first third in chunks of 7, then row by row, so that packs mix
    both.
    """
    runner = TorchRunner(Modules(model, backend), backend, model.device, "off", products="")
    blocks = torch.arange(1, 1 + len(tokens) * BLOCKS_EACH).view(-1, BLOCKS_EACH).flip(1).tolist()
    done, logits = [0] * len(tokens), [list[Tensor]() for _ in tokens]
    while any(d < len(t) for d, t in zip(done, tokens, strict=True)):
        batch: dict[int, SequenceRows] = {}
        for s, row in enumerate(tokens):
            if done[s] < len(row):
                chunk = row[done[s] : done[s] + (7 if done[s] < len(row) // 3 else 1)]
                batch[s] = SequenceRows(chunk, done[s], [blocks[s]])
        sizes = [len(rows.token_ids) for rows in batch.values()]
        output = runner.run(Step([*batch.values()], [*range(sum(sizes))]))
        for s, part in zip(batch, output.logits.split(sizes), strict=True):
            done[s] += len(part)
            logits[s].append(part)
    return [torch.cat(parts) for parts in logits]


def random_tokens() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 96, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(autouse=True)
def no_backend_left_over() -> Iterator[None]:
    yield
    transformers_hook.set_current_backend(None)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in UNLIKE])
@pytest.mark.parametrize("backend", BACKENDS)
def test_same_logits_as_the_plain_model(architecture: str, backend: str) -> None:
    tokens = random_tokens()
    plain, model = build(architecture, "eager"), build(architecture)
    packed = packed_logits(model, backend_for(model, backend), tokens)
    for row, logits in zip(tokens, packed, strict=True):
        with torch.inference_mode():
            expected = plain(input_ids=torch.tensor([row]), use_cache=False).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_moe"])
def test_serving_prepares_no_masks(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find packed sequences, Transformers first checks position ids, which waits for the device."""
    looked: list[Tensor] = []

    def find_packed_sequence_indices(position_ids: Tensor) -> None:
        looked.append(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", find_packed_sequence_indices)
    model = build(architecture)
    packed_logits(model, backend_for(model, "torch"), random_tokens())
    assert not looked
    build(architecture, "eager")(
        input_ids=torch.arange(6)[None], position_ids=torch.arange(6)[None], use_cache=False
    )
    assert looked


def attention_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"s_aux": torch.zeros(3, 4)}, "sinks"),
        ({"is_causal": False}, "causal"),
        ({"dropout": 0.1}, "dropout"),
        ({"output_attentions": True}, "output_attentions"),
        ({"unheard_of": 3}, "unheard_of"),
    ],
)
def test_unknown_arguments_are_refused(kwargs: dict[str, Any], named: str) -> None:
    module = torch.nn.Module()
    with pytest.raises(UnsupportedModelError, match=named):
        transformers_hook.paged_attention_forward(module, *attention_inputs(), None, **kwargs)


def test_unsupported_inputs_are_refused() -> None:
    module = torch.nn.Module()
    forward = transformers_hook.paged_attention_forward
    with pytest.raises(UnsupportedModelError, match="mask"):
        forward(module, *attention_inputs(), torch.zeros(1, 1, 3, 3))
    query, key, value = (each.expand(2, -1, -1, -1) for each in attention_inputs())
    with pytest.raises(UnsupportedModelError, match="packed"):
        forward(module, query, key, value, None)
    module.sinks = torch.zeros(4)
    with pytest.raises(UnsupportedModelError, match="sinks that are not passed"):
        forward(module, *attention_inputs(), None)
    module.sinks = None
    module.is_causal = False
    with pytest.raises(UnsupportedModelError, match="causal"):
        forward(module, *attention_inputs(), None)


def test_a_missing_backend_is_an_error() -> None:
    model = build("llama")
    with pytest.raises(RuntimeError, match="set_current_backend"):
        model(input_ids=torch.arange(6)[None], position_ids=torch.arange(6)[None], use_cache=False)


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is for Linux")
CUDA = torch.device("cuda")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton_support, "can_build", lambda: True)


@needs_triton
@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_uses_triton() -> None:
    cls, reason = select_backend(CUDA, torch.bfloat16)
    assert cls is backend_of("triton")
    assert reason == "reads the KV blocks in place"
    assert select_backend(CUDA, torch.float16)[0] is cls
    for name in ("sdpa", "torch"):
        assert select_backend(CUDA, torch.bfloat16, name)[0] is backend_of(name)


def test_calls_that_launch_kernels_can_be_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    (tmp_path / "gcc").touch(0o755)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(triton_support.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert triton_support.can_build()
    (tmp_path / "gcc").unlink()
    assert not triton_support.can_build()
    monkeypatch.setenv("CC", "clang-18")
    assert triton_support.can_build()
    (tmp_path / "Python.h").unlink()
    assert not triton_support.can_build()


@needs_triton
@pytest.mark.usefixtures("a_gpu")
def test_models_that_triton_does_not_support_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    cls, reason = select_backend(CUDA, torch.float64)
    assert cls is TorchBackend
    assert "torch.float64" in reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "not 7.5" in select_backend(CUDA, torch.float16)[1]
    monkeypatch.setattr(triton_support, "can_build", lambda: False)
    assert "a C compiler and Python's headers" in select_backend(CUDA, torch.float16)[1]
    monkeypatch.setattr(triton_support.importlib.util, "find_spec", lambda name: None)
    assert "package triton" in select_backend(CUDA, torch.float16)[1]
    for name in ("triton", "sdpa"):
        with pytest.raises(ValueError, match=rf"attention backend '{name}': .* package triton"):
            select_backend(CUDA, torch.float16, name)
    with pytest.raises(ValueError, match="does not run on cpu"):
        select_backend(torch.device("cpu"), torch.float32, "triton")
