"""Quantization at load by rounding to nearest: errors within half a step, and unsupported layers
are refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from engine.linear.packed_quantized import PackedQuantizedLinear
from engine.linear.quantized import QuantizedLinear, group_size, round_to_nearest
from engine.load.loader import load_model
from engine.load.rounding import round_head, round_linears
from engine.model.families import FAMILIES, is_never_rounded
from engine.quantization.weight import E2M1_VALUES, CodeFormat
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from quantization.calibration import linears
from tests.e2e.architectures import GEMMA4_EXPERTS, config_of
from tests.engine.kernels import needs_kernel
from tests.engine.quantization.quantized_model import write_quantized
from tests.worker.tiny_model import write_tiny_llama


@pytest.mark.parametrize(("format", "group"), [(CodeFormat.INT8, 256), (CodeFormat.INT4, 64)])
def test_integers_err_by_half_a_step(format: CodeFormat, group: int) -> None:
    weight = torch.randn(20, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3, :64] = 0
    quantized = round_to_nearest(weight, format, group)
    assert quantized.group_size == group
    groups = weight.float().unflatten(1, (-1, group))
    error = (quantized.dequantized().unflatten(1, (-1, group)) - groups).abs()
    values = groups / quantized.scales[..., None]
    # int4 has no +8: values near the range's far end on the other side become 7.
    most = torch.where(values > 7, 1.0, 0.5 + 1e-5) if format is CodeFormat.INT4 else 0.5 + 1e-5
    assert (error <= most * quantized.scales.abs()[..., None]).all()
    assert torch.allclose(values.abs().amax(2)[0], torch.tensor(127.0 if format is CodeFormat.INT8 else 8.0))


def test_fp8_errs_by_a_sixteenth_of_the_value_or_half_the_smallest_step() -> None:
    weight = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    quantized = round_to_nearest(weight, CodeFormat.FP8, 256)
    error = (quantized.dequantized() - weight).abs()
    assert (error <= weight.abs() / 16 + quantized.scales * 2**-10 + 1e-7).all()
    assert torch.allclose(quantized.dequantized().abs().amax(1), weight.abs().amax(1))


def test_mxfp4_takes_the_power_of_two_with_the_least_squared_error() -> None:
    weight = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    weight[0] = torch.tensor([7.9, *[0.5] * 31])  # 6 is far from 7.9, but 1 as a step is farther from 0.5
    weight[1] = torch.tensor([7.9, *[1.0] * 31])  # 8 is near, and 1 is among the multiples of the step
    weight[2] = 0
    quantized = round_to_nearest(weight, CodeFormat.MXFP4, 32)
    assert quantized.scales[:3, 0].tolist() == [1, 2, 1]
    error = (quantized.dequantized() - weight).square().sum(1)
    largest = weight.abs().amax(1, keepdim=True)
    values = torch.tensor(E2M1_VALUES)
    for power in range(-2, 3):
        scales = torch.exp2(largest.log2().floor().clamp(min=-9) + power)
        rounded = (weight.unsqueeze(2) / scales.unsqueeze(2) - values).abs().amin(2) * scales
        assert (error <= rounded.square().sum(1) + 1e-5).all(), power


@pytest.mark.parametrize(
    ("format", "inputs", "group"),
    [
        (CodeFormat.INT4, 384, 128),
        (CodeFormat.INT4, 192, 64),
        (CodeFormat.INT4, 96, 32),
        (CodeFormat.INT4, 40, None),
        (CodeFormat.MXFP4, 48, None),
        (CodeFormat.INT8, 40, 40),
        (CodeFormat.FP8, 7, 7),
    ],
)
def test_the_largest_fitting_group_is_chosen(format: CodeFormat, inputs: int, group: int | None) -> None:
    assert group_size(format, inputs) == group


def config(folder: Path, quantization: Any, dtype: Any = "bfloat16") -> ServeConfig:
    return ServeConfig(model=str(folder), device="cpu", dtype=dtype, quantization=quantization)


@needs_kernel
def test_a_model_is_quantized_at_load_except_its_head(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    plain, int8, fp8 = (load_model(config(tmp_path, each)) for each in (None, "int8", "fp8"))
    linears = [m for m in int8.model.modules() if isinstance(m, PackedQuantizedLinear)]
    assert len(linears) == 7 * int8.model.config.num_hidden_layers
    assert type(int8.model.lm_head) is nn.Linear
    assert len({plain.weights, int8.weights, fp8.weights}) == 3, "their KV is not the same"
    assert load_model(config(tmp_path, "int8")).weights == int8.weights


def write_plain(folder: Path, **shape: object) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    AutoConfig.for_model("llama", vocab_size=300, **sizes, **shape).save_pretrained(folder)


@needs_kernel
@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_alone_can_be_int8(tmp_path: Path, tied: bool, quantization: str | None) -> None:
    write_plain(tmp_path, tie_word_embeddings=tied)
    asked = replace(config(tmp_path, quantization), load_format="dummy")
    plain = load_model(asked)
    head = load_model(replace(asked, quantize_lm_head=True))
    assert plain.weights != head.weights
    ours = head.model.get_output_embeddings()
    assert isinstance(ours, PackedQuantizedLinear) and ours.format is CodeFormat.INT8
    embeddings = head.model.get_input_embeddings()
    assert type(embeddings) is nn.Embedding
    assert torch.equal(embeddings.weight, plain.model.get_input_embeddings().weight)
    x = torch.randn(9, ours.in_features).bfloat16()
    exact = x.double() @ plain.model.get_output_embeddings().weight.T.double()
    error = (ours(x).double() - exact).square().mean().sqrt()
    assert 0 < error < 0.02 * exact.square().mean().sqrt()


def test_a_head_that_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    model = load_model(config(tmp_path, None, "float32")).model
    round_head(model)
    with pytest.raises(ConfigError, match="--quantize-lm-head: the model's head is already quantized"):
        round_head(model)
    model.lm_head = nn.Identity()
    with pytest.raises(ConfigError, match="--quantize-lm-head: llama's head is not a linear layer"):
        round_head(model)


def test_experts_that_are_not_quantized_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    AutoConfig.for_model("qwen3_moe", vocab_size=64, **sizes, **experts).save_pretrained(tmp_path)
    asked = config(tmp_path, "int8", "float32")
    with caplog.at_level("WARNING", "tandem.engine"):
        load_model(replace(asked, load_format="dummy"))
    megabytes = 4 * 3 * 32 * 64 * 4 / 1e6
    assert f"fused experts ({megabytes:.1f} MB) are not rounded" in caplog.text


def test_routers_are_never_rounded() -> None:
    """At load, nor by `tandem quantize`: Gemma 4's, which is a linear layer."""
    model = AutoModelForCausalLM.from_config(config_of("gemma4_text", **GEMMA4_EXPERTS))
    names = set(linears(model))
    round_linears(model, CodeFormat.INT8)
    rounded = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert rounded == names - {"lm_head"} and "model.layers.0.mlp.up_proj" in rounded
    assert type(model.model.layers[0].router.proj) is nn.Linear


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.routing is not None])
def test_each_familys_router_is_never_rounded(name: str) -> None:
    routing = FAMILIES[name].routing
    assert routing is not None
    assert is_never_rounded(f"model.layers.0.{routing.block}.{routing.router}")
    assert not is_never_rounded(f"model.layers.0.{FAMILIES[name].down}")


def test_layers_that_no_group_fits_are_refused_if_no_layer_fits(tmp_path: Path) -> None:
    shape = {"hidden_size": 40, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    AutoConfig.for_model("llama", vocab_size=64, **shape).save_pretrained(tmp_path)
    options = ServeConfig(model=str(tmp_path), device="cpu", load_format="dummy", quantization="int4")
    with pytest.raises(ConfigError, match="--quantization: int4 fits none of the model's 7 linear layers"):
        load_model(options)


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    write_quantized(tmp_path, "llama", "awq")
    with pytest.raises(ConfigError, match=r"--quantization: .* is already quantized by awq: remove"):
        load_model(config(tmp_path, "int8", "float32"))
