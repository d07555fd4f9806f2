"""Calibration block by block: the inputs of each layer, and the places that can take their scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, Phi3Config, PreTrainedModel

from engine.quantization.weight import QuantizedWeight
from protocol.errors import ConfigError
from quantization import awq, methods
from quantization.calibration import Calibration, LinearGroup, Moments, linears
from quantization.folding import ScaleFold, find_fold
from quantization.preparation import Recipe
from tests.quantization.tiny import tiny_config, tiny_model, windows

LLAMA_LIKE = [
    LinearGroup(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    LinearGroup(("self_attn.o_proj",)),
    LinearGroup(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    LinearGroup(("mlp.down_proj",)),
]
SMALL = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def logits(model: PreTrainedModel) -> Tensor:
    return model(input_ids=windows(), use_cache=False).logits


def begin(model: PreTrainedModel) -> Calibration:
    return Calibration.begin(model, windows())


def in_units_of_size(rows: Tensor) -> Tensor:
    return rows / rows.square().mean(-1, keepdim=True).sqrt()


def test_blocks_run_one_by_one_equal_the_model() -> None:
    model = tiny_model()
    whole = model.model(input_ids=windows(), use_cache=False).last_hidden_state
    calibration = begin(model)
    for _ in range(2):
        calibration.advance()
    after = model.model.norm(torch.cat(calibration.hidden))
    assert torch.allclose(after, whole, atol=1e-5)


def test_groups_are_layers_with_the_same_input() -> None:
    assert begin(tiny_model()).groups() == LLAMA_LIKE


def test_a_layer_without_calibration_inputs_is_its_own_group() -> None:
    model = tiny_model()
    model.model.layers[0].spare = nn.Linear(64, 64)
    assert begin(model).groups() == [*LLAMA_LIKE, LinearGroup(("spare",))]


def test_moments_are_of_all_inputs() -> None:
    model = tiny_model()
    calibration = begin(model)
    group = LLAMA_LIKE[0]
    found = calibration.moments([group])[group]
    block = model.model.layers[0]
    inputs = in_units_of_size(block.input_layernorm(model.model.embed_tokens(windows())).flatten(0, 1))
    assert found.tokens == len(inputs)
    assert torch.allclose(found.products, inputs.T @ inputs, rtol=1e-4, atol=1e-2)
    assert torch.allclose(found.mean_magnitudes, inputs.abs().mean(0), rtol=1e-5)
    scales = torch.rand(64) + 0.5
    scaled = inputs / scales
    assert torch.allclose(found.divided(scales).products, scaled.T @ scaled, rtol=1e-4, atol=1e-2)


def test_moments_of_many_channels_are_symmetric() -> None:
    rows = torch.randn(40, 1100)
    moments = Moments.of_width(1100, rows.device)
    for part in rows.split(25):
        moments.add(part.unsqueeze(0))
    moments.complete()
    assert torch.equal(moments.products, moments.products.T)
    rows = in_units_of_size(rows)
    assert torch.allclose(moments.products, rows.T @ rows, atol=1e-3)


def test_a_token_with_huge_inputs_counts_as_much_as_any_other() -> None:
    rows = torch.randn(40, 16)
    moments, others = Moments.of_width(16, rows.device), Moments.of_width(16, rows.device)
    others.add(rows)
    rows[0] *= 500
    moments.add(rows)
    assert torch.allclose(moments.products, others.products, rtol=1e-4, atol=1e-4)
    assert torch.allclose(moments.magnitudes, others.magnitudes, rtol=1e-4)
    moments.add(torch.zeros(1, 16))
    assert moments.products.isfinite().all()


def test_scales_go_only_where_they_keep_the_function() -> None:
    model = tiny_model()
    before = logits(model)
    calibration = begin(model)
    groups = calibration.groups()
    folds = [find_fold(calibration, groups, group) for group in groups]
    assert torch.equal(logits(model), before)
    assert [fold and fold.module for fold in folds] == [
        "input_layernorm",
        "self_attn.v_proj",
        "post_attention_layernorm",
        "mlp.up_proj",
    ]
    for fold in folds:
        assert fold is not None
        fold.apply(calibration.block, torch.rand(fold.channels) + 0.5)
    assert not torch.equal(logits(model), before)
    assert torch.allclose(logits(model), before, atol=1e-3)


def test_a_module_that_changes_the_function_takes_no_scales() -> None:
    model = tiny_model()
    before = logits(model)
    calibration = begin(model)
    heads = torch.arange(64) // 32 * 16 + torch.arange(64) % 16
    assert not ScaleFold("self_attn.k_proj", LLAMA_LIKE[1], heads).is_exact(calibration)
    assert not ScaleFold("self_attn.v_proj", LLAMA_LIKE[1], heads.flip(0)).is_exact(calibration)
    assert not ScaleFold("mlp.gate_proj", LLAMA_LIKE[3], torch.arange(96)).is_exact(calibration)
    assert ScaleFold("self_attn.v_proj", LLAMA_LIKE[1], heads).is_exact(calibration)
    assert torch.equal(logits(model), before)


def inputs_of(calibration: Calibration) -> dict[str, Tensor]:
    """Return the inputs of each linear layer of the block, [tokens, in]."""
    found: dict[str, list[Tensor]] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda _, given, name=name: found.setdefault(name, []).append(given[0])
        )
        for name, layer in linears(calibration.block).items()
    ]
    block, position = calibration.block, calibration.position
    for hidden in calibration.hidden:
        block(hidden, **calibration._arguments[position])
    for handle in handles:
        handle.remove()
    return {name: torch.cat(each, 1)[0] for name, each in found.items()}


def test_awq_rounds_for_scaled_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = begin(tiny_model())
    norm = calibration.block.input_layernorm.weight.clone()
    quantize, seen = awq.quantize, []

    def keep(weight: Tensor, products: Tensor, bits: int, group_size: int) -> QuantizedWeight:
        seen.append((weight.clone(), products))
        return quantize(weight, products, bits, group_size)

    monkeypatch.setattr(awq, "quantize", keep)
    methods.calibrate_block(Recipe("awq", 4, 32), calibration, pytest.fail)
    assert not torch.allclose(calibration.block.input_layernorm.weight, norm, rtol=0.1)
    layers = linears(calibration.block)
    for layer, (weight, _) in zip(layers.values(), seen, strict=True):
        layer.weight.copy_(weight)
    inputs, before = inputs_of(calibration), inputs_of(begin(tiny_model()))
    for name, (_, used) in zip(layers, seen, strict=True):
        scaled = inputs[name] / before[name].square().mean(-1, keepdim=True).sqrt()
        assert torch.allclose(scaled.T @ scaled, used, rtol=1e-3, atol=1e-3 * float(used.max())), name


def test_a_large_residual_hides_no_wrong_place() -> None:
    model = tiny_model()
    model.model.embed_tokens.weight[:, 5] = 1e5
    calibration = begin(model)
    assert not ScaleFold("mlp.gate_proj", LLAMA_LIKE[3], torch.arange(96)).is_exact(calibration)
    assert ScaleFold("mlp.up_proj", LLAMA_LIKE[3], torch.arange(96)).is_exact(calibration)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_places_are_found_in_16_bits(dtype: torch.dtype) -> None:
    calibration = begin(tiny_model().to(dtype))
    groups = calibration.groups()
    assert all(find_fold(calibration, groups, group) for group in groups)


def test_fused_layers_take_scales_in_their_last_rows() -> None:
    config = Phi3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    calibration = begin(tiny_model(config))
    groups = calibration.groups()
    found = [find_fold(calibration, groups, group) for group in groups]
    assert [fold and (fold.module, fold.channels) for fold in found] == [
        ("input_layernorm", 64),
        ("self_attn.qkv_proj", 32),
        ("post_attention_layernorm", 64),
        ("mlp.gate_up_proj", 96),
    ]


def test_layers_that_nothing_can_scale_are_reported_and_rounded() -> None:
    """An activation lies between the two layers of this MLP."""
    calibration = begin(tiny_model(GPTNeoXConfig(**SMALL, num_attention_heads=4, rotary_pct=1.0)))
    said: list[str] = []
    recipe = Recipe("awq", 4, 32)
    quantized = methods.calibrate_block(recipe, calibration, said.append)
    assert quantized.keys() == linears(calibration.block).keys()
    assert said[-1] == "mlp.dense_4h_to_h: not scaled, as no module before can take the scales"


def test_blocks_that_need_more_than_hidden_states_are_refused() -> None:
    model = tiny_model()
    layers = model.model.layers
    layers[0].register_forward_hook(lambda _, args, output: setattr(layers[1], "other", output.mean()))
    layers[1].register_forward_hook(lambda block, _, output: output + (block.other if model.is_whole else 0))
    model.register_forward_pre_hook(lambda *_: setattr(model, "is_whole", True))
    model.register_forward_hook(lambda *_: setattr(model, "is_whole", False))
    with pytest.raises(ConfigError, match="block 1 of qwen2 depends on more than the hidden states"):
        begin(model)


def test_values_that_are_not_finite_are_refused() -> None:
    model = tiny_model(tiny_config())
    calibration = begin(model)
    calibration.hidden[3] = calibration.hidden[3] / 0
    with pytest.raises(ConfigError, match=r"self_attn.q_proj of block 0 gets inputs that are not finite"):
        calibration.moments(calibration.groups())
    model.model.layers[1].mlp.up_proj.weight[3, 5] = float("inf")
    with pytest.raises(ConfigError, match="output of block 1 is not finite"):
        begin(model)
