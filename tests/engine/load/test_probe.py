"""The load probe accepts models that are served right, in any dtype, and refuses others by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.devices.torch import transformers_hook
from engine.devices.torch.latent_attention import Absorbed, absorb
from engine.kv.layout import Group, LayerPlace, LayerShape, Segment
from engine.load import probe as probe_module
from engine.load.probe import probe
from protocol.errors import UnsupportedModelError
from tests.e2e.architectures import ARCHITECTURES, config_of

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
LAYERS = [LayerShape(2, 16, 16)] * 3

FALCON_H1 = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32}


def build(model_type: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    transformers_hook.register()
    torch.manual_seed(0)
    config = config_of(model_type, **changes)
    name = transformers_hook.NAME
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=name).eval()


def check(model: PreTrainedModel) -> Group:
    return probe(model, model.dtype, model.config.num_hidden_layers).kv


def planes(layers: int, heads: int, *dims: int) -> list[tuple[int, int, int, int]]:
    """Return separate segments for keys and values."""
    return [(layers, heads, dim, 1) for dim in dims]


SEGMENTS: dict[str, list[tuple[int, int, int, int]]] = {
    "gemma3n_text": [(3, 2, 16, 2)],
    "gemma4_text": [(1, 2, 16, 2), (1, 2, 32, 2)],
    "mimo_v2_flash": [*planes(1, 1, 24, 16), *planes(2, 2, 24, 16)],
    "deepseek_v3": planes(3, 4, 24, 16),
    "gpt2": [(3, 4, 16, 2)],
    "gpt_neox": [(3, 4, 16, 2)],
    "opt": [(3, 4, 16, 2)],
}
"""Layers, KV heads, dimensions and planes of segments that differ from (3, 2, 16, 2)."""
PLACES = {"gemma3n_text": [(0, 0), (0, 1), (0, 2), (0, 1)], "gemma4_text": [(0, 0), (1, 0)] * 2}
"""The segment and index of each layer, for models whose layers share KV."""


@dtypes
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_models_that_are_served_right_are_accepted(model_type: str, dtype: torch.dtype) -> None:
    group = check(build(model_type, dtype))
    expected = [
        Segment(layers, heads, dim, dtype, num_planes=num_planes)
        for layers, heads, dim, num_planes in SEGMENTS.get(model_type, [(3, 2, 16, 2)])
    ]
    assert [*group.segments] == expected
    if model_type in PLACES:
        assert [(place.segment, place.index) for place in group.layers] == PLACES[model_type]


@dtypes
def test_latents_with_expanded_keys_and_values_are_accepted(dtype: torch.dtype) -> None:
    model = build("deepseek_v3", dtype)
    absorb(model)
    assert check(model).segments == (Segment(3, 1, 24, dtype, num_planes=1),)
    assert check(model).layers[2] == LayerPlace(0, 2, value_dim=16)


def test_wrongly_absorbed_latents_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("deepseek_v3", torch.float32)
    absorb(model)
    monkeypatch.setattr(Absorbed, "queries", lambda _, rows: rows[..., :24])
    with pytest.raises(UnsupportedModelError, match="gets other logits than whole and alone"):
        check(model)


@dtypes
def test_recurrent_state_beside_attention_is_refused(dtype: torch.dtype) -> None:
    """In bfloat16 the leak is smaller than rounding errors."""
    with pytest.raises(UnsupportedModelError, match="falcon_h1: tokens influence each other outside"):
        check(build("falcon_h1", dtype, initializer_range=0.02, **FALCON_H1))


def test_leaks_are_detected_by_logits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("falcon_h1", torch.float32, initializer_range=0.02, **FALCON_H1)
    monkeypatch.setattr(probe_module, "_probe_structure", lambda *_: (LAYERS, [], []))
    with pytest.raises(UnsupportedModelError, match="falcon_h1: a text in chunks"):
        check(model)


@dtypes
def test_a_convolution_over_keys_is_refused(dtype: torch.dtype) -> None:
    """Logits do not show it while attention is off."""
    model = build("llama", dtype)
    project = model.model.layers[1].self_attn.k_proj
    project.register_forward_hook(lambda _, __, keys: keys + keys.roll(1, 1) * 1e-6)
    with pytest.raises(UnsupportedModelError, match="llama: tokens influence each other outside"):
        check(model)


@dtypes
def test_positions_by_row_are_refused(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model is right only for a whole text alone."""
    model = build("llama", dtype)

    def by_row(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        position_ids: Tensor = kwargs["position_ids"]
        rows = torch.arange(position_ids.shape[1]).expand_as(position_ids)
        return args, kwargs | {"position_ids": rows}

    model.model.rotary_emb.register_forward_pre_hook(by_row, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="llama: a token's state depends on its row"):
        check(model)
    if dtype is torch.float32:
        monkeypatch.setattr(probe_module, "_probe_structure", lambda *_: (LAYERS, [], []))
        with pytest.raises(UnsupportedModelError, match="llama: a text in chunks"):
            check(model)


def test_attention_that_differs_from_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backends lack some feature of it, so even a whole text would be wrong."""
    model = build("llama", torch.float32)
    for layer in model.model.layers:
        layer.self_attn.scaling = 1.0
    forward = transformers_hook.paged_attention_forward

    def ignores_scaling(*args: Any, scaling: float, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    monkeypatch.setattr(transformers_hook, "paged_attention_forward", ignores_scaling)
    transformers_hook.register()
    monkeypatch.undo()
    try:
        with pytest.raises(UnsupportedModelError, match="llama: a text in chunks"):
            check(model)
    finally:
        transformers_hook.register()


def test_the_probe_leaves_the_model_ready_to_serve() -> None:
    model = build("llama", torch.float32)
    check(model)
    assert model.config._attn_implementation == transformers_hook.NAME
    assert not model.get_input_embeddings()._forward_hooks
