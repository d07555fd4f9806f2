"""Calibrated methods beat rounding, on inputs and weights like those of real models and on a real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine.linear.quantized import group_size, round_to_nearest
from engine.quantization.weight import CodeFormat, QuantizedWeight
from quantization import awq, command, gptq, texts
from quantization.calibration import Moments, find_blocks, linears
from quantization.preparation import Method, QuantizeOptions
from quantization.texts import predict
from tests.real_models import smollm2
from training.data import read_texts

ROOT = Path(__file__).parents[2]
LENGTH = 512
BLOCKS = 5
"""The number of blocks that are quantized, of 30: each takes CPU seconds."""


def first_blocks(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    name, blocks = find_blocks(model)
    return name, blocks[:BLOCKS]


@dataclass(frozen=True)
class Rounded:
    """SmolLM2 with weights of the first blocks rounded to nearest, and its score on the file `held_out`."""

    model: Path
    held_out: Path
    bits_per_byte: float


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Rounded:
    folder = smollm2()
    held_out = tmp_path_factory.mktemp("text") / "held_out.md"
    held_out.write_text((Path(__file__).parent / "held_out.txt").read_text()[:3_000])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    for layer in linears(first_blocks(model)[1]).values():
        group = group_size(CodeFormat.INT4, layer.in_features)
        assert group is not None
        layer.weight.copy_(round_to_nearest(layer.weight, CodeFormat.INT4, group).dequantized())
    given, tokenizer = read_texts(held_out), AutoTokenizer.from_pretrained(folder)
    text = texts.cut(given, given, 0, LENGTH, 0, tokenizer).held_out
    return Rounded(folder, held_out, predict(model, text).bits_per_byte)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_calibrated_method_loses_less_than_rounding(
    method: Method, rounded: Rounded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[texts.TextQuality] = []

    def keep(model: PreTrainedModel, text: texts.HeldOut) -> texts.TextQuality:
        measured.append(predict(model, text))
        return measured[-1]

    monkeypatch.setattr(command, "predict", keep)
    monkeypatch.setattr(command, "find_blocks", first_blocks)
    options = QuantizeOptions(
        method=method,
        model=str(rounded.model),
        output=tmp_path / "out",
        data=ROOT / "docs",
        held_out=rounded.held_out,
        samples=4,
        sequence_length=LENGTH,
        device="cpu",
    )
    command.quantize(options, Console())
    before, after = measured
    assert before.perplexity < 60, "the model is not what its publisher trained"
    by_method, by_rounding = (
        bits / before.bits_per_byte - 1 for bits in (after.bits_per_byte, rounded.bits_per_byte)
    )
    print(f"{method} {by_method:+.2%}, rounded to nearest {by_rounding:+.2%}")
    assert by_method < 0.8 * by_rounding


OUTPUTS, INPUTS, GROUP, TOKENS = 96, 256, 64, 1024


def case(num_huge: int) -> tuple[Tensor, Tensor]:
    """Return a weight with heavy tails and correlated inputs [tokens, in], `num_huge` of them huge."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(TOKENS, 48, generator=random) @ torch.randn(48, INPUTS, generator=random)
    inputs = inputs + 2 * torch.randn(TOKENS, INPUTS, generator=random)
    inputs[:, ::50] *= 5
    inputs[:num_huge] = 0.01 * torch.randn(num_huge, INPUTS, generator=random)
    inputs[:num_huge, 7] = 20_000
    weight = torch.randn(OUTPUTS, INPUTS, generator=random)
    return weight * (1 + 0.4 * torch.randn(OUTPUTS, INPUTS, generator=random).square()), inputs


@pytest.mark.parametrize("num_huge", [0, 2])
@pytest.mark.parametrize(
    ("method", "share"), [(gptq.quantize, 0.2), (awq.quantize, 0.7)], ids=["gptq", "awq"]
)
def test_outputs_of_ordinary_tokens_change_less(
    method: Callable[[Tensor, Tensor, int, int], QuantizedWeight], share: float, num_huge: int
) -> None:
    weight, inputs = case(num_huge)
    moments = Moments.of_width(INPUTS, inputs.device)
    moments.add(inputs)
    moments.complete()
    unseen = case(0)[1][TOKENS // 2 :]

    def error(rounded: Tensor) -> float:
        return float((unseen @ (rounded - weight).T).square().mean())

    rounded = round_to_nearest(weight, CodeFormat.INT4, GROUP).dequantized()
    calibrated = method(weight, moments.products, 4, GROUP).dequantized()
    assert error(calibrated) < share * error(rounded)
