"""gpt-oss's own checkpoints: experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import backend_over
from engine.devices.cpu.attention.backend import CpuBackend
from engine.devices.torch import transformers_hook
from engine.kv.layout import TARGET, PoolLayout
from engine.kv.pool import KVPool
from engine.load.loader import load_model
from engine.load.select import build_runner, pack_model
from protocol.config import ServeConfig
from protocol.errors import UnsupportedModelError
from tests.e2e.architectures import config_of
from tests.engine.devices.test_decoder import are_same
from tests.engine.kernels import CPU, needs_kernel
from tests.engine.quantization.quantized_model import check_experts

TOKENS = torch.tensor([[5, 9, 250, 3, 77, 8]])


def write(folder: Path) -> dict[str, Tensor]:
    """Write a checkpoint as OpenAI publishes them, and beside it the dequantized tensors."""
    torch.manual_seed(0)
    config = config_of("gpt_oss", intermediate_size=64)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    stored, plain = load_file(folder / "model.safetensors"), {}
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    plain = {**{name: tensor for name, tensor in stored.items() if name not in plain}, **plain}
    save(folder, stored)
    return {name: tensor for name, tensor in plain.items() if not name.endswith(("_blocks", "_scales"))}


def save(folder: Path, stored: dict[str, Tensor]) -> None:
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(described))


def load(folder: Path, dtype: Any = "float32") -> torch.nn.Module:
    return load_model(ServeConfig(model=str(folder), device="cpu", dtype=dtype)).model


@needs_kernel
def test_experts_stay_quantized_if_our_kernel_supports_them(tmp_path: Path) -> None:
    write(tmp_path)
    model, exact = load(tmp_path, "bfloat16"), load(tmp_path)
    check_experts(model, exact)


@needs_kernel
def test_the_native_decoder_multiplies_by_experts_as_stored(tmp_path: Path) -> None:
    """The modules multiply by them, too."""
    write(tmp_path)
    outputs = []
    for compile in ("auto", "off"):
        loaded = load_model(ServeConfig(model=str(tmp_path), device="cpu", dtype="bfloat16"))
        pool = KVPool(PoolLayout((loaded.kv_group,), 16), 4, CPU, None)
        backend = backend_over(CpuBackend, pool.layers(TARGET), pool.groups[TARGET])
        packed = pack_model(loaded, compile, CpuBackend)
        assert (packed.description is not None) == (compile == "auto")
        rows = SequenceRows(TOKENS[0].tolist(), 0, [[1, 2]])
        step = Step([rows], range(len(TOKENS[0])))
        outputs.append(build_runner(packed, backend, compile).run(step).logits)
    assert are_same(*outputs)


def test_weights_equal_transformers(tmp_path: Path) -> None:
    plain = write(tmp_path)
    model = load(tmp_path)
    loaded = model.state_dict()
    assert loaded.keys() == plain.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in plain.items())
    assert model.config._attn_implementation == transformers_hook.NAME


@pytest.mark.parametrize(
    ("suffix", "broken", "reason"),
    [
        ("_scales", None, "is missing next to .*down_proj_blocks"),
        ("_scales", lambda scales: scales.fill_(255), "has scales that are NaN"),
        ("_scales", lambda scales: scales[..., :1].clone(), r"has shape \[4, 64, 1\], not \[4, 64, 2\]"),
        ("_blocks", lambda blocks: blocks.int(), "is torch.int32, not torch.uint8"),
        (
            "_blocks",
            lambda blocks: blocks[..., 0].clone(),
            r"has shape .* not \[experts, outputs, groups, 16\]",
        ),
        ("_blocks", None, "down_proj: is missing"),
    ],
)
def test_bad_tensors_are_refused_by_name(tmp_path: Path, suffix: str, broken: object, reason: str) -> None:
    write(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.down_proj{suffix}"
    tensor = stored.pop(name)
    if callable(broken):
        stored[name] = broken(tensor)
    save(tmp_path, stored)
    with pytest.raises(
        UnsupportedModelError, match=f"layers.1.mlp.experts.down_proj.*{reason}" if broken else reason
    ):
        load(tmp_path)


def test_a_tensor_outside_the_experts_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for suffix in ("_blocks", "_scales"):
        stored[f"model.layers.1.mlp.router{suffix}"] = stored.pop(
            f"model.layers.1.mlp.experts.down_proj{suffix}"
        )
    save(tmp_path, stored)
    with pytest.raises(UnsupportedModelError, match=r"layers.1.mlp.router: no experts of the model have"):
        load(tmp_path)
