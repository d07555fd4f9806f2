"""Models of each architecture are written as GGUF, loaded, and compared with the originals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from checkpoints.gguf.config import gguf_folder
from checkpoints.gguf.reader import GgufError, read_gguf
from engine.engine import Engine
from engine.linear.quantized import QuantizedLinear
from engine.load.loader import load_model
from engine.quantization.gguf_blocks import dequantized
from protocol.config import ServeConfig
from protocol.errors import ConfigError, UnsupportedModelError
from tests.checkpoints.gguf_writer import byte_level, write_gguf, write_raw
from tests.e2e.architectures import GEMMA4_EXPERTS, SLIDING_WINDOW, write_model
from tests.engine.kernels import needs_kernel
from tests.engine.quantization.quantized_model import check_experts
from tests.speculation.small_engine import ask, prompt_of, run, tokens

F32, Q8_0, Q4_1 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1
MXFP4 = GGMLQuantizationType.MXFP4
PARTS = ("gate", "up", "down")
ROTATED = np.array([1] * 4 + [1e30] * 12, np.float32)
"""The divisors of Gemma 4's frequencies: a quarter of each head of its full layers turns."""
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 48}
WINDOW = {"attention.sliding_window": SLIDING_WINDOW}
GEMMA4 = WINDOW | {
    "attention.sliding_window_pattern": [True, False] * 2,
    "attention.key_length": 32,
    "attention.key_length_swa": 16,
    "rope.freq_base": 1e6,
}
QWEN35 = {
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "rope.dimension_count": 8,
    "rope.dimension_sections": [2, 1, 1, 0],
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MINISTRAL = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_beta_fast": 8.0,
    "rope.scaling.yarn_beta_slow": 2.0,
    "rope.scaling.yarn_log_multiplier": 1.0,
    "attention.temperature_scale": 0.5,
}
GLM4_MOE: dict[str, Any] = EXPERTS | {
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
    "rope.dimension_count": 8,
}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1e6},
    "qwen2": {},
    "qwen3": {},
    "qwen3moe": EXPERTS,
    "gemma2": WINDOW | {"attn_logit_softcapping": 8.0},
    "gemma3": WINDOW | {"rope.freq_base": 1e6},
    "gemma4": GEMMA4
    | {
        "attention.shared_kv_layers": 2,
        "embedding_length_per_layer_input": 16,
        "feed_forward_length": [96] * 2 + [192] * 2,
    },
    "phi3": WINDOW | {"rope.dimension_count": 16},
    "gpt-oss": WINDOW | {"expert_count": 4, "expert_used_count": 2},
    "qwen35": QWEN35,
    "qwen35moe": QWEN35 | EXPERTS | {"expert_shared_feed_forward_length": 48},
    "mistral": {},
    "mistral3": MINISTRAL,
    "glm4moe": GLM4_MOE,
    "lfm2": {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
    "stablelm": {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 4},
    "starcoder2": {"attention.layer_norm_epsilon": 1e-5},
}
"""Metadata by architecture. For the last two, Transformers' own reader adds nothing."""
QWEN35_SHAPE: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": ROPE
    | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": False},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "gemma4": {"tie_word_embeddings": True, "use_double_wide_mlp": True},
    "starcoder2": {"sliding_window": None},
    "gpt-oss": {
        "intermediate_size": 64,
        "rope_parameters": ROPE,
    },
    "qwen35": QWEN35_SHAPE,
    "qwen35moe": QWEN35_SHAPE,
    "mistral": {"sliding_window": None},
    "mistral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "glm4moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
    },
    "lfm2": {"block_auto_adjust_ff_dim": False, "rope_parameters": ROPE},
}
"""Fields that a GGUF file does not state, since llama.cpp derives them from the architecture."""
MODEL_TYPES = {
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "mistral3": "ministral3",
    "glm4moe": "glm4_moe",
}
NAMES_IN_FILES = {"mixtral": "llama", "mistral": "mistral3"}
"""llama.cpp's names of architectures that share theirs with another one."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make folders of GGUF files in an empty cache, but keep the kernels that are compiled already."""
    monkeypatch.setattr("checkpoints.gguf.config.cache_dir", lambda: tmp_path / "cache")


def model_of(architecture: str, folder: Path, **changes: Any) -> PreTrainedModel:
    changes = CHANGES.get(architecture, {}) | changes
    write_model(MODEL_TYPES.get(architecture, architecture), folder, **changes)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def config_of(path: Path) -> ServeConfig:
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return ServeConfig(
        model=str(path), dtype="float32", device="cpu", compile="off", kv_cache_memory_bytes=2**22, **sizes
    )


@pytest.mark.parametrize("architecture", FIELDS)
def test_tokens_are_the_models(architecture: str, tmp_path: Path) -> None:
    model = model_of(architecture, tmp_path / "hf")
    path = tmp_path / "model.gguf"
    more = {"rope_freqs.weight": (ROTATED, F32)} if architecture == "gemma4" else {}
    write_gguf(path, NAMES_IN_FILES.get(architecture, architecture), model, more=more, **FIELDS[architecture])
    requests = [ask(f"r{n}", prompt_of(n, n), 12, ignore_eos=True) for n in (5, 40)]
    found = tokens(run(Engine(config_of(path)), requests))
    assert found == tokens(run(Engine(config_of(tmp_path / "hf")), requests))


@pytest.mark.parametrize("kind", [Q8_0, Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_weights_equal_those_that_transformers_reads(
    architecture: str, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    """Linear layers and the head stay quantized. Fused experts are dequantized for float32."""
    changes = {"moe_intermediate_size": 64, "tie_word_embeddings": architecture == "llama"}
    model = model_of(architecture, tmp_path / "hf", **changes)
    path = tmp_path / "model.gguf"
    fields = {**FIELDS[architecture], "expert_feed_forward_length": 64}
    write_gguf(path, architecture, model, kind, **fields)
    loaded = load_model(config_of(path)).model
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert len(expected) == len(model.state_dict()) - model.config.tie_word_embeddings
    kept = {name: each for name, each in loaded.named_modules() if isinstance(each, QuantizedLinear)}
    assert len(kept) == (3 * 7 + 1 if architecture == "llama" else 3 * 4 + 1)
    for name, weight in expected.items():
        linear = kept.get(name.removesuffix(".weight"))
        ours = linear.quantized.dequantized() if linear else loaded.get_parameter(name)
        torch.testing.assert_close(ours, weight, atol=1e-6, rtol=1e-6)


def test_experts_of_gemma_4_and_heads_by_kind_of_layer(tmp_path: Path) -> None:
    model, path = model_of("gemma4", tmp_path / "hf", **GEMMA4_EXPERTS), tmp_path / "model.gguf"
    fields: dict[str, Any] = {
        **GEMMA4,
        **EXPERTS,
        "attention.head_count_kv": [2, 1] * 2,
        "final_logit_softcapping": 30.0,
    }
    fields["expert_feed_forward_length"] = model.config.moe_intermediate_size
    write_gguf(path, "gemma4", model, more={"rope_freqs.weight": (ROTATED, F32)}, **fields)
    requests = [ask(f"r{n}", prompt_of(n, n), 12, ignore_eos=True) for n in (5, 40)]
    found = tokens(run(Engine(config_of(path)), requests))
    assert found == tokens(run(Engine(config_of(tmp_path / "hf")), requests))


def test_keys_of_layers_that_use_earlier_ones_are_left_out(tmp_path: Path) -> None:
    path, model = tmp_path / "model.gguf", model_of("gemma4", tmp_path / "hf")
    more = {"rope_freqs.weight": (ROTATED, F32), "blk.3.attn_k.weight": (np.zeros((64, 64), np.float32), F32)}
    write_gguf(path, "gemma4", model, more=more, **FIELDS["gemma4"])
    load_model(config_of(path))
    more["blk.1.attn_other.weight"] = more["blk.3.attn_k.weight"]
    write_gguf(path, "gemma4", model, more=more, **FIELDS["gemma4"])
    with pytest.raises(ConfigError, match=r"tensor blk\.1\.attn_other\.weight: .* has no such tensor"):
        load_model(config_of(path))


@pytest.fixture
def read_by_transformers(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], PreTrainedModel]:
    """Return a function that reads a file as Transformers does, which on a CPU needs no accelerate."""
    pytest.importorskip("transformers.integrations.gguf", reason="this Transformers reads no such files")

    def read(path: Path) -> PreTrainedModel:
        with monkeypatch.context() as patched:
            patched.setattr("transformers.modeling_utils.is_accelerate_available", lambda: True)
            try:
                return AutoModelForCausalLM.from_pretrained(
                    path.parent, gguf_file=path.name, dtype=torch.float32
                )
            except ValueError as error:
                if "not supported yet" in str(error):
                    pytest.skip(f"Transformers {transformers.__version__} does not read such a file")
                raise

    return read


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe", "lfm2"])
def test_transformers_reads_the_same_model(
    architecture: str, tmp_path: Path, read_by_transformers: Callable[[Path], PreTrainedModel]
) -> None:
    """So the tests write these architectures as llama.cpp does."""
    model = model_of(architecture, tmp_path / "hf")
    write_gguf(tmp_path / "model.gguf", architecture, model, **FIELDS[architecture])
    read = read_by_transformers(tmp_path / "model.gguf")
    tokens = torch.tensor([prompt_of(1, 40)])
    torch.testing.assert_close(read(tokens).logits, model(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", [Q8_0, Q4_1], ids=lambda kind: kind.name)
def test_qwen35_keeps_its_matrices_quantized_in_the_models_order(
    kind: GGMLQuantizationType, tmp_path: Path, read_by_transformers: Callable[[Path], PreTrainedModel]
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "qwen35", model_of("qwen35", tmp_path / "hf"), kind, **FIELDS["qwen35"])
    loaded = load_model(config_of(path)).model
    read = read_by_transformers(path)
    kept = {name: each for name, each in loaded.named_modules() if isinstance(each, QuantizedLinear)}
    assert {name.rpartition(".")[2] for name in kept} >= {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj"}
    for name, linear in kept.items():
        expected = read.get_parameter(f"{name}.weight")
        torch.testing.assert_close(linear.quantized.dequantized(), expected, atol=1e-6, rtol=1e-6)


def test_what_chooses_experts_of_glm_is_not_rounded(tmp_path: Path) -> None:
    model, path = model_of("glm4moe", tmp_path / "hf"), tmp_path / "model.gguf"
    gate = "model.layers.1.mlp.gate"
    torch.nn.init.normal_(model.get_buffer(f"{gate}.e_score_correction_bias"))
    write_gguf(path, "glm4moe", model, **GLM4_MOE)
    read = {name: each for name, each in read_gguf(path).tensors.items() if name.startswith("blk.1.")}
    loaded = load_model(replace(config_of(path), dtype="bfloat16")).model.get_submodule(gate)
    assert torch.equal(
        loaded.e_score_correction_bias, dequantized(read["blk.1.exp_probs_b.bias"], torch.float32)
    )
    assert torch.equal(loaded.weight, dequantized(read["blk.1.ffn_gate_inp.weight"], torch.float32))


def test_blocks_of_an_mtp_head_are_left_out(tmp_path: Path) -> None:
    model = model_of("qwen35", tmp_path / "hf")
    path, head = (
        tmp_path / "model.gguf",
        {"blk.3.nextn.eh_proj.weight": (np.zeros((64, 128), np.float32), F32)},
    )
    fields = FIELDS["qwen35"] | {"block_count": 4, "nextn_predict_layers": 1}
    write_gguf(path, "qwen35", model, more=head, **fields)
    assert load_model(config_of(path)).model.config.num_hidden_layers == 3


@needs_kernel
@pytest.mark.parametrize("kind", [MXFP4, Q8_0], ids=lambda kind: kind.name)
def test_experts_of_gpt_oss_stay_quantized(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """Its published files have them in MXFP4, gate and up in tensors of their own."""
    path = tmp_path / "model.gguf"
    write_gguf(path, "gpt-oss", model_of("gpt-oss", tmp_path / "hf"), kind, **FIELDS["gpt-oss"])
    exact = load_model(config_of(path)).model
    stored = read_gguf(path).tensors
    for layer in range(exact.config.num_hidden_layers):
        values = [dequantized(stored[f"blk.{layer}.ffn_{part}_exps.weight"], torch.float32) for part in PARTS]
        gate, up, down = (each.transpose(1, 2) for each in values)
        experts = exact.get_submodule(f"model.layers.{layer}.mlp.experts")
        torch.testing.assert_close(experts.gate_up_proj[..., 0::2], gate, atol=1e-6, rtol=0)
        torch.testing.assert_close(experts.gate_up_proj[..., 1::2], up, atol=1e-6, rtol=0)
        torch.testing.assert_close(experts.down_proj, down, atol=1e-6, rtol=0)
    check_experts(load_model(replace(config_of(path), dtype="bfloat16")).model, exact)


def test_gpt_oss_has_its_makers_yarn(tmp_path: Path) -> None:
    fields = {"rope.scaling.type": "yarn", "rope.scaling.factor": 32.0, "rope.freq_base": 150_000.0}
    fields |= {"rope.scaling.original_context_length": 4096}
    path = tmp_path / "model.gguf"
    write_gguf(path, "gpt-oss", model_of("gpt-oss", tmp_path / "hf"), **FIELDS["gpt-oss"] | fields)
    found = AutoConfig.from_pretrained(gguf_folder(path)).rope_parameters
    told = {name: found[name] for name in ("rope_type", "rope_theta", "factor", "truncate")}
    assert told == {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "truncate": False}
    assert found["original_max_position_embeddings"] == 4096


def test_experts_without_their_biases_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    missing = "blk.1.ffn_up_exps.bias"
    model = model_of("gpt-oss", tmp_path / "hf")
    write_gguf(path, "gpt-oss", model, without=missing, **FIELDS["gpt-oss"])
    with pytest.raises(GgufError, match=rf"tensor {re.escape(missing)}: is missing"):
        load_model(config_of(path))


@pytest.mark.parametrize(
    ("architecture", "name", "shape"),
    [
        ("gpt-oss", "blk.0.ffn_up_exps.weight", (4, 32, 64)),
        ("gpt-oss", "blk.0.ffn_up_exps.bias", (4, 32)),
        ("gpt-oss", "blk.0.ffn_down_exps.weight", (256, 64)),
        ("mixtral", "blk.0.ffn_gate_exps.weight", (6, 96, 64)),
    ],
)
@pytest.mark.parametrize("kind", [F32, Q8_0], ids=lambda kind: kind.name)
def test_experts_of_another_shape_are_named(
    architecture: str, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    path, model = tmp_path / "model.gguf", model_of(architecture, tmp_path / "hf")
    wrong = (np.zeros(shape, np.float32), F32)
    if kind is Q8_0 and name.endswith("weight"):
        wrong = quantize(wrong[0], Q8_0), Q8_0
    stored = NAMES_IN_FILES.get(architecture, architecture)
    write_gguf(path, stored, model, kind, more={name: wrong}, **FIELDS[architecture])
    with pytest.raises(GgufError, match=rf"tensor {re.escape(name)}: has shape {re.escape(str([*shape]))}"):
        load_model(config_of(path))


def llama_file(tmp_path: Path, **fields: Any) -> Path:
    write_gguf(tmp_path / "model.gguf", "llama", model_of("llama", tmp_path / "hf"), **fields)
    return tmp_path / "model.gguf"


def test_the_folder_is_made_once_for_a_file(tmp_path: Path) -> None:
    path = llama_file(tmp_path)
    folder = gguf_folder(path)
    assert gguf_folder(path) == folder
    os.utime(path, (1, 1))
    assert gguf_folder(path) != folder


def test_folders_of_files_that_are_gone_or_have_changed_are_deleted(tmp_path: Path) -> None:
    """As is what a killed process left, but not what another process may be making now."""
    path = llama_file(tmp_path)
    (gone := tmp_path / "gone.gguf").write_bytes(path.read_bytes())
    cache, outdated = gguf_folder(path).parent, {gguf_folder(path), gguf_folder(gone)}
    being_made, left = cache / "being-made", cache / "left"
    being_made.mkdir()
    left.mkdir()
    gone.unlink()
    for changed in (path, left):
        os.utime(changed, (1, 1))
    new = gguf_folder(path)
    assert new not in outdated
    assert set(cache.iterdir()) == {new, cache / f"{new.name}.lock", being_made}


def test_the_folder_is_made_without_torch(tmp_path: Path) -> None:
    """A router starts without torch, which saves seconds."""
    code = (
        "import sys; from pathlib import Path; from checkpoints.gguf.config import gguf_folder;"
        "gguf_folder(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, llama_file(tmp_path)]).returncode == 0


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = llama_file(tmp_path)
    gguf_folder(path).chmod(0o777)
    with pytest.raises(GgufError, match=r"model\.gguf: cannot be read: .*can be written by others"):
        gguf_folder(path)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, fields: dict[str, Any], scaling: dict[str, Any]) -> None:
    config = AutoConfig.from_pretrained(gguf_folder(llama_file(tmp_path, **fields)))
    assert scaling.items() <= config.rope_parameters.items()


def test_llama_3_scaling_is_found_by_its_factors(tmp_path: Path) -> None:
    """llama.cpp stores the divisor of each frequency. The factors found must be those of Transformers."""
    told = {
        "rope_type": "llama3",
        "rope_theta": 10_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = model_of("llama", tmp_path / "hf", rope_parameters=told)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    path = tmp_path / "model.gguf"
    factors = (plain / scaled).float().numpy()
    write_gguf(path, "llama", model, more={"rope_freqs.weight": (factors, F32)})
    config = AutoConfig.from_pretrained(gguf_folder(path))
    assert config.rope_parameters == told
    write_gguf(path, "llama", model, more={"rope_freqs.weight": (factors * 1.5, F32)})
    with pytest.raises(GgufError, match=r"tensor rope_freqs\.weight: its factors are not"):
        gguf_folder(path)


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        ("rwkv7", {}, r"general\.architecture: is 'rwkv7', not one of llama, .*Transformers cannot read it"),
        ("t5", {}, r"general\.architecture: t5 is no decoder"),
        ("lfm2", {}, r"lfm2\.context_length: is missing"),
        ("llama", {"expert_count": 8}, r"llama\.expert_used_count: is missing"),
        ("llama", {"rope.scaling.type": "odd"}, r"llama\.rope\.scaling\.type: is 'odd'"),
        ("llama", {"feed_forward_length": [96, 64]}, r"feed_forward_length: differs by layer"),
        ("llama", {"embedding_length": "x"}, r"llama\.embedding_length: is 'x', not a number"),
        (
            "llama",
            {"attention.head_count": 0},
            r"model\.gguf: its metadata cannot be used: ZeroDivisionError",
        ),
        (
            "llama",
            {"feed_forward_length": 64},
            r"tensor blk\.0\.ffn_gate\.weight: has shape \[96, 64\], not \[64, 64\]",
        ),
        ("llama", {"block_count": 2}, r"tensor blk\.2\.\S+: LlamaForCausalLM has no such tensor"),
    ],
)
def test_an_unsupported_file_is_a_clear_error(
    architecture: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = llama_file(tmp_path, **fields)
    if architecture != "llama":
        write_raw(path, architecture, {f"tokenizer.ggml.{k}": v for k, v in byte_level(280).items()}, {})
    with pytest.raises(ConfigError, match=reason):
        load_model(config_of(path))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = llama_file(tmp_path, without="blk.1.attn_q.weight")
    with pytest.raises(UnsupportedModelError, match=r"layers\.1\.self_attn\.q_proj\.weight: is missing"):
        load_model(config_of(path))
