"""Quantized checkpoints load as models with the logits of the dequantized weights."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PreTrainedModel

from engine.devices.loaded_model import LoadedModel
from engine.linear.quantized import QuantizedLinear
from engine.load.loader import load_model
from engine.load.quantized_checkpoint import load_quantized
from protocol.config import ServeConfig
from protocol.errors import ConfigError, UnsupportedModelError
from tests.engine.kernels import needs_kernel
from tests.engine.quantization.quantized_model import EXPERTS, LAYOUTS, check_experts, write_quantized

TOKENS = torch.tensor([[5, 9, 250, 3, 77, 8]])


def load(folder: Path, dtype: Any = "float32") -> LoadedModel:
    return load_model(ServeConfig(model=str(folder), device="cpu", dtype=dtype))


def logits(model: PreTrainedModel) -> Tensor:
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model(TOKENS).logits


def num_quantized(loaded: LoadedModel) -> int:
    return sum(isinstance(module, QuantizedLinear) for module in loaded.model.modules())


@pytest.mark.parametrize(
    ("name", "model_type", "per_layer"),
    [
        *((name, "llama", 7) for name in LAYOUTS),
        ("awq", "qwen2", 7),
        ("gptq", "qwen3", 7),
        ("awq", "phi3", 4),
    ],
)
def test_logits_equal_those_of_the_dequantized_weights(
    tmp_path: Path, name: str, model_type: str, per_layer: int
) -> None:
    dense = write_quantized(tmp_path, model_type, name)
    loaded = load(tmp_path)
    assert num_quantized(loaded) == 2 * per_layer
    assert loaded.eos_token_ids == [0]
    torch.testing.assert_close(logits(loaded.model), logits(dense), rtol=1e-5, atol=1e-5)


def test_shards_biases_and_tied_embeddings_are_read(tmp_path: Path) -> None:
    shape = {"attention_bias": True, "tie_word_embeddings": True}
    dense = write_quantized(tmp_path, "llama", "packed_int4", shards=3, **shape)
    loaded = load(tmp_path)
    model = loaded.model
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert model.model.layers[0].self_attn.q_proj.bias is not None
    torch.testing.assert_close(logits(model), logits(dense), rtol=1e-5, atol=1e-5)


def test_float16_checkpoints_run_in_bfloat16(tmp_path: Path) -> None:
    dense = write_quantized(tmp_path, "llama", "awq", dtype=torch.float16)
    loaded = load(tmp_path, "auto")
    assert loaded.dtype is torch.bfloat16
    assert loaded.model.get_input_embeddings().weight.dtype is torch.bfloat16
    expected = logits(dense)
    error = (logits(loaded.model).float() - expected).square().mean().sqrt()
    assert error < 0.05 * expected.square().mean().sqrt()


def test_the_generation_configuration_is_read(tmp_path: Path) -> None:
    write_quantized(tmp_path, "llama", "awq")
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [0, 7]}))
    assert load(tmp_path).eos_token_ids == [0, 7]
    path.unlink()
    assert load(tmp_path).eos_token_ids == [0]


def test_experts_that_the_model_fuses_are_dequantized(tmp_path: Path) -> None:
    dense = write_quantized(tmp_path, "qwen3_moe", "awq", **EXPERTS)
    loaded = load(tmp_path)
    assert num_quantized(loaded) == 2 * 4, "attention"
    torch.testing.assert_close(logits(loaded.model), logits(dense), rtol=1e-5, atol=1e-5)


@needs_kernel
@pytest.mark.parametrize("name", ["awq", "packed_int4", "int8", "fp8_blocks"])
def test_separate_experts_stay_quantized_if_our_kernel_supports_them(tmp_path: Path, name: str) -> None:
    dense = write_quantized(tmp_path, "qwen3_moe", name, **EXPERTS)
    loaded = load(tmp_path, "bfloat16")
    check_experts(loaded.model, dense)


class OnTheDevice(TorchFunctionMode):
    """Records what is moved to the device, and the most tensors there at once in their file's format."""

    DEVICE = torch.device("cpu", 0)

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.most = 0
        self._living: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not Tensor.to or args[1:] != (self.DEVICE,):
            return result
        moved = result.clone()
        self.num_bytes += moved.nbytes
        self._living = [*(each for each in self._living if each() is not None), weakref.ref(moved)]
        self.most = max(self.most, len(self._living))
        return moved


@pytest.mark.parametrize(("model_type", "shape"), [("llama", {}), ("qwen3_moe", EXPERTS)])
def test_each_layer_goes_to_the_device_as_it_is_read(
    tmp_path: Path, model_type: str, shape: dict[str, int]
) -> None:
    """So a host without enough memory for a model can fill a GPU with it."""
    write_quantized(tmp_path, model_type, "awq", **shape)
    stored = load_file(tmp_path / "model.safetensors")
    device = OnTheDevice()
    with device:
        config = AutoConfig.from_pretrained(tmp_path)
        load_quantized(
            str(tmp_path), None, config, torch.float32, {}, OnTheDevice.DEVICE, keeps_experts=False
        )
    quantized = [t for name, t in stored.items() if name.endswith(("qweight", "qzeros", "scales"))]
    assert device.num_bytes == sum(tensor.nbytes for tensor in quantized)
    assert device.most <= 2 * 3, "a layer's codes, zero points and scales, and those of the layer before"


def test_weights_differ_from_other_quantizations_of_the_same_model(tmp_path: Path) -> None:
    found = {}
    for name in ("awq", "packed_int4", "gptq_int8", "int8"):
        (tmp_path / name).mkdir()
        write_quantized(tmp_path / name, "llama", name)
        found[name] = load(tmp_path / name).weights
    assert len(set(found.values())) == 4, (
        "the last two have the same weights, one of them with rounded inputs"
    )


PROJ = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq", {f"{PROJ}.scales": None}, f"{PROJ}.scales: is missing"),
        ("int8", {f"{PROJ}.weight_scale": None}, f"{PROJ}.weight_scale: is missing"),
        ("int8", {f"{PROJ}.weight_scale": None, f"{PROJ}.weight": None}, f"{PROJ}.weight: is missing"),
        ("awq", {"model.norm.weight": None}, "model.norm.weight: is missing"),
        ("awq", {"model.norm.weight": lambda t: t[:3]}, r"model.norm.weight: has shape \[3\], not \[64\]"),
        ("awq", {"lm_head.weight": lambda t: t.to(torch.int8)}, "lm_head.weight: is torch.int8, and has no"),
    ],
)
def test_a_bad_tensor_is_refused_by_name(
    tmp_path: Path, name: str, change: dict[str, Any], message: str
) -> None:
    write_quantized(tmp_path, "llama", name)
    tensors = load_file(tmp_path / "model.safetensors")
    for tensor, make in change.items():
        old = tensors.pop(tensor)
        if make is not None:
            tensors[tensor] = make(old).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=message):
        load(tmp_path)


def test_broken_and_missing_files_are_named(tmp_path: Path) -> None:
    write_quantized(tmp_path, "llama", "awq", shards=2)
    path = tmp_path / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"--model: .*model-1.safetensors: cannot be read"):
        load(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=r"--model: .* lacks model-1.safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ConfigError, match=r"--model: .* has neither model.safetensors nor"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "run_as"),
    [("float32", "run in float32"), pytest.param("bfloat16", "multiplied as stored", marks=needs_kernel)],
)
@pytest.mark.parametrize(
    ("name", "kind"), [("awq", "int4 in groups of 32 and zero points"), ("gptq", "int4 in groups")]
)
def test_the_start_logs_the_format_and_its_execution(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, kind: str, dtype: str, run_as: str
) -> None:
    write_quantized(tmp_path, "llama", name)
    with caplog.at_level("INFO", "tandem.engine"):
        told = load(tmp_path, dtype).checkpoint
    assert told.startswith(f"{name} checkpoint, 14 linear layers in {kind}") and told.endswith(run_as)
    assert caplog.messages.count(f"{tmp_path.name}: {told}") == 1
