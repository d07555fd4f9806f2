"""The model drafts with some of its own layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine.engine import Engine
from engine.kv.layout import TARGET
from engine.linear import packed_quantized
from engine.linear.packed_quantized import PackedWeight
from engine.load.select import load_packed
from engine.quantization.weight import QuantizedWeight
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.speculation import SpeculativeConfig
from speculation import self_speculative
from speculation.speculator import BatchSpeculator
from tests.e2e.architectures import write_model
from tests.engine.kernels import needs_kernel
from tests.speculation.scripted import Answers
from tests.speculation.small_engine import ask, drafted_and_accepted, prompt_of, run, small_config, tokens

NUM_LAYERS = 4
LLAMA = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma3_text": LLAMA | {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt2": {"n_embd": 128, "n_inner": 128, "n_positions": 512, "n_layer": NUM_LAYERS, "n_head": 4},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write models in which layers after the first change little."""
    made = {}
    for name, fields in MODELS.items():
        folder = made[name] = tmp_path_factory.mktemp(name)
        torch.manual_seed(3)
        shape = {"vocab_size": 300, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4}
        config = AutoConfig.for_model(
            name, **(shape | {"max_position_embeddings": 512, "initializer_range": 0.1} | fields)
        )
        config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for path, weight in model.named_parameters():
                if ".0." not in path and any(end in path for end in ("o_proj", "down_proj", "c_proj")):
                    weight *= 0.1
        model.save_pretrained(folder)
    return made


def config_of(folder: Path, dtype: str = "bfloat16", **options: Any) -> ServeConfig:
    asked = SpeculativeConfig(method="self_speculative", **({"num_speculative_tokens": 4} | options))
    config = small_config(folder, dtype=dtype, compile="auto" if folder.name.startswith("llama") else "off")
    return replace(config, speculative_config=asked, kv_cache_memory_bytes=16 << 20)


def engine_of(folder: Path, dtype: str = "bfloat16", **options: Any) -> Engine:
    return Engine(config_of(folder, dtype, **options), speculate=BatchSpeculator)


def plain_of(folder: Path, dtype: str) -> Engine:
    return Engine(replace(config_of(folder, dtype), speculative_config=None))


REQUESTS = [
    ask(f"r{i}", prompt_of(20 + 9 * i, i), 24, ignore_eos=True, temperature=0.8 * (i % 2)) for i in range(3)
]


@pytest.fixture(scope="module")
def plain(folders: dict[str, Path]) -> Callable[[str, str], Answers]:
    """Return a model's answers in a dtype, without drafts."""
    return functools.cache(lambda model, dtype: tokens(run(plain_of(folders[model], dtype), REQUESTS)))


DTYPES = ["float32", pytest.param("bfloat16", marks=needs_kernel)]


PARTS: dict[str, dict[str, Any]] = {
    "skip_layers": {"skip_layers": [1, 2]},
    "exit_layer": {"exit_layer": 3},
    "quantization": {"quantization": "int4"},
    "default": {},
}


@pytest.mark.parametrize(
    ("part", "model", "dtype"),
    [
        *((part, "llama", "float32") for part in PARTS),
        *(pytest.param(part, "llama", "bfloat16", marks=needs_kernel) for part in PARTS),
        ("skip_layers", "gemma3_text", "float32"),
        ("exit_layer", "gpt2", "float32"),
        pytest.param("default", "gemma3_text", "bfloat16", marks=needs_kernel),
        pytest.param("quantization", "gpt2", "bfloat16", marks=needs_kernel),
    ],
)
def test_no_choice_of_layers_changes_a_token(
    folders: dict[str, Path], plain: Callable[[str, str], Answers], part: str, model: str, dtype: str
) -> None:
    engine = engine_of(folders[model], dtype, **PARTS[part])
    assert [group.name for group in engine.pool.groups.values()] == [TARGET], "it has no KV of its own"
    found = run(engine, REQUESTS)
    assert tokens(found) == plain(model, dtype)
    drafted, accepted = drafted_and_accepted(found)
    assert drafted / 5 < accepted < drafted
    assert part != "quantization" or accepted > drafted / 3


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("gpt2", "float32"),
        ("gemma3_text", "float32"),
        pytest.param("gemma3_text", "bfloat16", marks=needs_kernel),
        pytest.param("llama", "bfloat16", marks=needs_kernel),
    ],
)
def test_drafts_of_all_layers_are_always_right(
    folders: dict[str, Path], model: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer with another's KV, or out of order, would sometimes be wrong."""
    monkeypatch.setattr(self_speculative, "with_defaults", lambda options, *_, **__: options)
    drafted, accepted = drafted_and_accepted(run(engine_of(folders[model], dtype), REQUESTS))
    assert drafted == accepted > 40


@needs_kernel
@pytest.mark.parametrize("options", [{}, {"quantization": "int4"}], ids=str)
@pytest.mark.parametrize("model", ["falcon_h1", "qwen3_moe"])
def test_layers_with_two_mixers_or_experts_draft_natively(
    model: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers draft, so unquantized drafts are always right."""
    monkeypatch.setattr(self_speculative, "with_defaults", lambda options, *_, **__: options)
    write_model(model, tmp_path)
    config = replace(config_of(tmp_path, **options), compile="auto")
    engine = Engine(config, speculate=BatchSpeculator)
    assert engine.start_up["forward"] == "native decoder"
    found = run(engine, REQUESTS)
    plain = Engine(replace(config, speculative_config=None))
    assert tokens(found) == tokens(run(plain, REQUESTS))
    drafted, accepted = drafted_and_accepted(found)
    assert drafted / 5 < accepted and (options or accepted == drafted > 40)


# --- the KV that the model and its draft share ------------------------------------------------------


def kv(engine: Engine, sequence: SequenceState, places: range, num_layers: int = NUM_LAYERS) -> Tensor:
    """Return KV as [layers, places, planes, KV heads, head_dim]."""
    (blocks,) = sequence.held.blocks
    size = engine.pool.block_size
    numbers, offsets = [blocks[place // size] for place in places], [place % size for place in places]
    layers = engine.pool.layers(TARGET)[:num_layers]
    return torch.stack(
        [torch.stack([side.values[numbers, offsets] for side in layer.sides], dim=1) for layer in layers]
    )


@needs_kernel
def test_draft_and_verification_write_the_same_bits_in_the_first_layers(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folders["llama"], exit_layer=3)
    drafting: list[tuple[SequenceState, int, list[int], Tensor]] = []
    propose = self_speculative.SelfDrafter.propose

    def watched(
        self: self_speculative.SelfDrafter, sequences: list[SequenceState], counts: list[int]
    ) -> list[Draft | None]:
        drafts = propose(self, sequences, counts)
        for sequence, draft in zip(sequences, drafts, strict=True):
            assert draft is not None
            last = len(sequence.token_ids) - 1
            written = kv(engine, sequence, range(last, last + draft.num_nodes), 3)
            drafting.append((sequence, last, list(draft.token_ids), written))
        return drafts

    monkeypatch.setattr(self_speculative.SelfDrafter, "propose", watched)
    for request in REQUESTS:
        engine.add(request)
    compared = 0
    while engine.has_work():
        drafting.clear()
        engine.step()
        for sequence, last, drafted, written in drafting:
            if sequence.sequence_blocks is not None:
                right = [a == b for a, b in zip(drafted, sequence.token_ids[last + 1 :], strict=False)]
                count = min(len(right) if all(right) else right.index(False) + 1, len(drafted))
                assert torch.equal(kv(engine, sequence, range(last, last + count), 3), written[:, :count])
                compared += count
    assert compared > 40


@needs_kernel
@pytest.mark.parametrize("options", [{"skip_layers": [1]}, {"quantization": "int4"}], ids=str)
def test_drafts_do_not_change_the_models_kv(folders: dict[str, Path], options: dict[str, Any]) -> None:
    """This includes layers whose weights or inputs differ in the draft."""
    place = range(60)
    values = []
    for engine in (engine_of(folders["llama"], **options), plain_of(folders["llama"], "bfloat16")):
        engine.add(ask("r", prompt_of(20), 60, ignore_eos=True))
        sequence = engine.sequences["r"]
        while sequence.num_computed < place.stop:
            engine.step()
        values.append(kv(engine, sequence, place))
    assert torch.equal(*values)


# --- models that cannot draft ------------------------------------------------------------------------


@needs_kernel
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("pays", [True, False])
def test_inputs_are_quantized_if_that_pays(
    folders: dict[str, Path], name: str, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: set[int] = set()
    pack = PackedWeight.of

    def of(weight: QuantizedWeight) -> PackedWeight:
        groups.add(weight.input_group)
        return pack(weight)

    monkeypatch.setattr(PackedWeight, "of", of)
    monkeypatch.setattr(packed_quantized, "_rounded_inputs_pay", lambda: pays)
    config = config_of(folders[name], quantization="int8")
    assert config.speculative_config is not None
    self_speculative.SelfDrafter(config.speculative_config, config, load_packed(config))
    assert groups == {128 if pays else 0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"exit_layer": 4}, "exit_layer: must be below the model's 4 layers, got 4"),
        ({"skip_layers": [1, 4]}, "skip_layers: the model's layers are 0 to 3, got 4"),
        ({"skip_layers": [0, 1, 2, 3]}, "skip_layers: at least one of the model's 4 layers must draft"),
    ],
)
def test_layers_out_of_range_are_named(
    folders: dict[str, Path], options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        engine_of(folders["llama"], "float32", **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_weights_are_not_quantized_again(folders: dict[str, Path], dtype: str) -> None:
    config = replace(config_of(folders["llama"], dtype, quantization="int4"), quantization="int8")
    with pytest.raises(ConfigError, match="quantization: the model's weights are already quantized"):
        Engine(config, speculate=BatchSpeculator)
