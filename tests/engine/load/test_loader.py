"""Models and options that the engine refuses to load, with its messages."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, modeling_utils

from engine.devices.cuda import tiles
from engine.devices.torch.latent_attention import absorb, expansion_reason
from engine.engine import Engine
from engine.kv.layout import Group, Segment
from engine.linear.experts import join_experts
from engine.load import loader
from engine.load.device_memory import memory_of_their_own
from engine.load.loader import is_preloaded, keep_preloaded, load_model
from engine.load.select import load_packed
from engine.model.families import FAMILIES
from engine.quantization.weight import CodeFormat
from protocol.config import ServeConfig
from protocol.errors import ConfigError, UnsupportedModelError
from tests.e2e.architectures import ARCHITECTURES, GEMMA4_EXPERTS, HYBRIDS, config_of, write_model
from tests.engine.quantization.quantized_model import EXPERTS, LAYOUTS, write_quantized
from tests.worker.tiny_model import write_tiny_llama


def config_for(folder: Path, **changes: Any) -> ServeConfig:
    return replace(
        ServeConfig(model=str(folder), device="cpu", dtype="float32", load_format="dummy"), **changes
    )


SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("mamba", {}, "mamba: recurrent state without any attention"),
        ("bloom", {"n_layer": 2, "n_head": 2}, "bloom: layers .*do not use the attention interface"),
        ("t5", {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}, "encoder-decoder"),
        ("llama4_text", {"attention_chunk_size": 8, "num_local_experts": 2}, "at most 8, not 64"),
        (
            "deepseek_v32",
            {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "index_topk": 4},
            "indexer .*index_topk",
        ),
    ],
)
def test_refuses_by_name(tmp_path: Path, model_type: str, changes: dict[str, Any], reason: str) -> None:
    shape = {} if model_type == "mamba" else SHAPE
    AutoConfig.for_model(model_type, **shape, **changes).save_pretrained(tmp_path)
    with pytest.raises((UnsupportedModelError, ConfigError), match=reason):
        load_model(config_for(tmp_path))


def test_missing_folder_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        load_model(config_for(tmp_path / "nowhere"))


def test_max_model_len_beyond_the_model_names_the_flag(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len: 2000 exceeds the model's 1024"):
        load_model(config_for(folder, max_model_len=2000))


def test_dummy_weights_are_equal_in_every_process(folder: Path) -> None:
    torch.manual_seed(1)
    first = load_model(config_for(folder))
    torch.manual_seed(2)
    second = load_model(config_for(folder))
    for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_facts_of_a_model(folder: Path, tmp_path: Path) -> None:
    loaded = load_model(config_for(folder, load_format="auto"))
    kv = Group.uniform("target", Segment(2, 2, 16, loaded.dtype))
    assert loaded.kv_group == dataclasses.replace(kv, layer_windows=(0, 0))
    assert loaded.max_model_len == 1024
    assert loaded.eos_token_ids == [0]
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert load_model(config_for(folder, generation_config=str(tmp_path))).eos_token_ids == [5, 7]
    assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == loaded.vocab_size


def test_weights_are_shared_only_for_the_same_files_and_configuration(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    config = config_for(tmp_path)
    loaded = load_model(config)
    try:
        changes: dict[str, Any] = {
            "dtype": "bfloat16",
            "load_format": "auto",
            "compile": "on",
            "max_model_len": 64,
        }
        for name, value in changes.items():
            keep_preloaded([(config, loaded)])
            assert not is_preloaded(replace(config, **{name: value}))
        assert load_model(config) is loaded
        assert load_model(config) is not loaded, "whoever has taken it may change it"
        keep_preloaded([(config, loaded)])
        (tmp_path / "model.safetensors").write_bytes(b"other weights")
        assert not is_preloaded(config)
        keep_preloaded([(config, loaded)])
        os.utime(tmp_path / "model.safetensors", (1, 1))
        assert not is_preloaded(config)
    finally:
        keep_preloaded([])


def test_an_engine_takes_an_already_packed_model(folder: Path) -> None:
    """A forked worker does so. Packed weights no longer show what the check compares."""
    config = config_for(folder, dtype="bfloat16", load_format="auto", kv_cache_memory_bytes=2**24)
    keep_preloaded([(config, load_packed(config))])
    try:
        assert Engine(config).weights == load_model(config).weights
    finally:
        keep_preloaded([])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bfloat16"}, "the triton kernel found no cuda device"),
        ({"enable_lora": True, "compile": "off"}, "with --compile off torch's operators add adapters"),
        ({"enable_lora": True}, "the triton kernel found no cuda device"),
        ({"attention_backend": "torch"}, "with --attention-backend torch sums depend on the batch"),
    ],
)
def test_deterministic_is_refused_if_torch_would_sum(
    folder: Path, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, before any weight is read."""
    monkeypatch.setattr(loader, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(loader, "_load_weights", lambda *_, **__: pytest.fail("it reads the weights"))
    with pytest.raises(ConfigError, match=f"--deterministic: {reason}"):
        load_model(config_for(folder, deterministic=True, **options))


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_other_processes_cannot_map_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    with pytest.raises(ConfigError, match=f"{name}: expandable_segments must not be on"):
        loader.choose_device("auto")
    assert loader.choose_device("cpu").type == "cpu"
    monkeypatch.setenv(name, "expandable_segments:False")
    assert loader.choose_device("cuda").type == "cuda"


class WeightsReadError(Exception):
    pass


def test_weights_that_are_read_to_a_gpu_have_memory_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers would allocate them as one piece, which joined weights would leave with holes."""
    name, pieces = "caching_allocator_warmup", []
    assert name in PreTrainedModel._load_pretrained_model.__code__.co_names
    monkeypatch.setattr(modeling_utils, name, lambda *given: pieces.append(given))

    def read(*_: Any, device_map: Any, **__: Any) -> Any:
        modeling_utils.caching_allocator_warmup(None, device_map, None)
        raise WeightsReadError

    monkeypatch.setattr(loader, "load_checkpoint", read)
    monkeypatch.setattr(loader, "is_accelerate_available", lambda: True)
    config, gpu = config_for(tmp_path, load_format="auto"), torch.device("cuda")
    with pytest.raises(WeightsReadError):
        loader._load_weights(config, config_of("qwen3"), torch.bfloat16, gpu, None, has_kernel=False)
    assert not pieces
    with pytest.raises(WeightsReadError):
        read(device_map={"": gpu})
    assert pieces, "others allocate as before"
    monkeypatch.delattr(modeling_utils, name)
    with memory_of_their_own():
        assert not hasattr(modeling_utils, name), "a release that renamed it can still load"


def load_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load models as for a GPU, with their weights on the CPU."""
    load_weights = loader._load_weights

    def on_the_cpu(config: Any, hf_config: Any, dtype: Any, _: Any, *args: Any, has_kernel: bool) -> Any:
        return load_weights(config, hf_config, dtype, torch.device("cpu"), *args, has_kernel=has_kernel)

    monkeypatch.setattr(loader, "choose_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(loader, "_load_weights", on_the_cpu)


def test_deterministic_is_refused_for_products_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router's, unless our decoder runs the model. On a CPU all are our kernel's."""
    write_model("qwen3_moe", tmp_path)
    config = config_for(tmp_path, dtype="bfloat16", deterministic=True, compile="off")
    load_model(config)
    load_for_a_gpu(monkeypatch)
    monkeypatch.setattr(tiles, "backend_fault", lambda *_: None)
    refused = r"--deterministic: model\.layers\.0\.mlp\.gate\.weight, of Qwen3MoeTopKRouter"
    with pytest.raises(ConfigError, match=refused):
        load_model(config)


@pytest.mark.parametrize("model_type", ARCHITECTURES | HYBRIDS)
def test_products_outside_our_kernels_are_found(model_type: str) -> None:
    """A router's, with the model's own modules, or if no family describes it.

    In Transformers 5.17 Jamba's router is a linear layer, whose products are our kernel's.
    """
    for how in ("auto", "off"):
        model = AutoModelForCausalLM.from_config(config_of(model_type))
        config = ServeConfig(deterministic=True, compile=how)
        if not expansion_reason(model, config, torch.device("cuda")):
            absorb(model)
        has_router = any(type(each).__name__.lower().endswith("topkrouter") for each in model.modules())
        is_left = has_router and not (how == "auto" and type(model).__name__ in FAMILIES)
        assert (tiles.fault_of_weights(model, config) is not None) == is_left


@pytest.mark.parametrize("on_host", [False, True])
def test_experts_are_packed_for_a_gpu_that_holds_the_model(
    on_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks divide a model that is still in the host's memory, where its layers are probed."""
    write_model("qwen3_moe", tmp_path)
    packed: list[str] = []
    load_for_a_gpu(monkeypatch)
    monkeypatch.setattr(
        loader, "tile_experts_on_gpu", lambda model, device, dtype: packed.append(device.type)
    )
    monkeypatch.setattr(loader, "tile_on_gpu", lambda *_, plain: packed.append("linear layers"))
    load_model(config_for(tmp_path, dtype="float32"), on_host=on_host)
    assert packed == ([] if on_host else ["cuda", "linear layers"])


@pytest.mark.parametrize("layout", ["fp8", "gptq", "gptq_int8", "--quantization int4"])
def test_ranks_divide_quantized_experts_as_they_are_stored(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the host can run them, for the probe, and the model counts as that of one GPU."""
    tiled = pytest.importorskip("engine.devices.cuda.experts", reason="Triton is for Linux").RoutedTiles
    options = {"load_format": "auto"}
    if layout in LAYOUTS:
        format = LAYOUTS[layout][1]
        write_quantized(tmp_path, "qwen3_moe", layout, **EXPERTS)
    else:
        format = CodeFormat.INT4
        write_model("qwen3_moe", tmp_path, **EXPERTS)
        options["quantization"] = format.value
    load_for_a_gpu(monkeypatch)
    monkeypatch.setattr(tiles, "backend_fault", lambda *_: None)
    config = config_for(tmp_path, dtype="bfloat16", **options)
    loaded = load_model(config, on_host=True)
    parts = [each for each in loaded.model.modules() if isinstance(each, tiled)]
    assert {part.format for part in parts} == {format}
    pack = partial(tiled.of, dtype=torch.bfloat16)
    monkeypatch.setattr(loader, "tile_experts_on_gpu", lambda model, *_: join_experts(model, pack))
    monkeypatch.setattr(loader, "tile_on_gpu", lambda *_, plain: None)
    assert load_model(config).weights == loaded.weights


def test_rounding_leaves_routers_as_programs_need_them(tmp_path: Path) -> None:
    write_model("gemma4_text", tmp_path, **GEMMA4_EXPERTS)
    config = config_for(tmp_path, dtype="bfloat16", load_format="auto", quantization="int8")
    assert load_model(config).program is not None
