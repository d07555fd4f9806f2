"""The native decoder compared with Transformers' own modules over the same kernels."""

from __future__ import annotations

import copy
import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.batch.runner import ForwardOutput, Step
from engine.batch.step_inputs import RowArrays, SequenceRows
from engine.devices.cpu.attention.backend import CpuBackend
from engine.devices.cpu.decoder.description import Description, unfit
from engine.devices.cpu.decoder.forward import NativeDecoder
from engine.devices.cpu.decoder.native_model import DTYPES
from engine.devices.torch import transformers_hook
from engine.devices.torch.runner import Modules, TorchRunner
from engine.kv.attention import LayerKv
from engine.linear.packed import pack_linears
from engine.linear.packed_quantized import pack_quantized_linears
from engine.linear.quantized import QuantizedLinear, round_to_nearest
from engine.load.rounding import round_head, round_linears
from engine.model.describe import UndescribedModelError, describe
from engine.quantization.weight import CodeFormat
from tests.engine.kernels import needs_kernel

BLOCK, NUM_BLOCKS, POSITIONS = 16, 24, 256

pytestmark = needs_kernel

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "tie_word_embeddings": True},
    "llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
    },
    "qwen3": {"head_dim": 32},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 4.0,
    },
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 20,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    },
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 24},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 80,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 16},
    "gpt_oss": {
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "truncate": False,
        },
    },
}


def make_model(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    transformers_hook.register()
    torch.manual_seed(3)
    fields = {"model_type": name} | MODELS[name]
    config = AutoConfig.for_model(
        fields.pop("model_type"),
        vocab_size=331,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.2,
        **fields,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="tandem")
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases with an effect
            parameter.data += torch.randn_like(parameter) * 0.3
    return model.eval().requires_grad_(False)


def new_backend(model: PreTrainedModel) -> CpuBackend:
    attention = model.model.layers[0].self_attn
    heads, layers = model.config.num_key_value_heads, model.config.num_hidden_layers
    pool = torch.zeros(NUM_BLOCKS, layers, 2, BLOCK, heads, attention.head_dim, dtype=model.dtype)
    return CpuBackend([LayerKv.of(layer) for layer in pool.unbind(1)])


class Both:
    """The same model, natively and by its own modules, each with its own pool."""

    def __init__(
        self,
        name: str,
        hidden_layers: tuple[int, ...] = (),
        quantization: CodeFormat | None = None,
        quantized_head: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        model = make_model(name, dtype)
        if quantization is not None:
            round_linears(model, quantization)
        if quantized_head:
            round_head(model)
        pack_quantized_linears(model)
        program = describe(model)
        assert unfit(program) is None
        ours, theirs = new_backend(model), new_backend(model)
        own = copy.deepcopy(model)
        self.native = NativeDecoder(Description(program, POSITIONS), ours, hidden_layers)
        pack_linears(own)  # leaves float32 to torch
        forward = Modules(own, theirs, hidden_layers)
        self.modules = TorchRunner(forward, theirs, own.device, "off", products="packed", packed=True)

    def run(self, batch: list[SequenceRows], logit_rows: list[int]) -> tuple[ForwardOutput, ForwardOutput]:
        step = Step(batch, logit_rows)
        return self.native.run(step), self.modules.run(step)


def most_swaps(fields: Mapping[str, Any]) -> float:
    """Return the `swaps` of `assert_same` for a model with these fields."""
    return 0.1 if "num_experts_per_tok" in fields else 0.0


def are_same(ours: Tensor, theirs: Tensor, slack: float = 1.0, swaps: float = 0.0) -> bool:
    """Tell whether results agree. A norm's float32 sum is taken in another order, so rarely a value is
    rounded the other way.

    If inputs are rounded to int8 that is a larger step. States that last need some `slack`. In the share
    `swaps` of the rows, one of two nearly tied experts may be exchanged for the other.
    """
    difference = (ours.float() - theirs.float()).abs()
    scale = theirs.float().abs().mean()
    apart = difference.flatten(1).amax(1) > 0.2 * slack * scale
    return bool(difference.mean() < 0.02 * slack * scale and apart.sum() <= math.ceil(swaps * len(apart)))


def assert_same(ours: Tensor, theirs: Tensor, slack: float = 1.0, swaps: float = 0.0) -> None:
    """Assert what `are_same` tests."""
    assert are_same(ours, theirs, slack, swaps)


def steps(seed: int = 0) -> list[tuple[list[SequenceRows], list[int]]]:
    """Return a prompt, another one beside its next token, and both with several rows."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(0, 331, (count,), generator=generator).tolist()

    one, other = list(range(8)), list(range(8, 16))
    return [
        ([SequenceRows(tokens(70), 0, [one])], [69]),
        ([SequenceRows(tokens(1), 70, [one]), SequenceRows(tokens(33), 0, [other])], [0, 33, 5]),
        ([SequenceRows(tokens(5), 71, [one]), SequenceRows(tokens(1), 33, [other])], [0, 1, 2, 3, 4, 5]),
        ([SequenceRows(tokens(1), 76, [one])], [0]),
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_the_modules(name: str, threads: int, threads_restored: None) -> None:
    """If experts are swapped in a prompt's row, all rows that see its keys and values differ. This may happen
    in one of several conversations with such a model.
    """
    torch.set_num_threads(threads)
    swaps, same = most_swaps(MODELS[name]), []
    for seed in range(4 if swaps else 1):
        both, steps_alike = Both(name), []
        for batch, logit_rows in steps(seed):
            ours, theirs = both.run(batch, logit_rows)
            assert ours.hidden is None
            steps_alike.append(are_same(ours.logits, theirs.logits, swaps=swaps))
        same.append(all(steps_alike))
    assert same.count(False) <= len(same) // 4


@pytest.mark.parametrize("name", [name for name in MODELS if not most_swaps(MODELS[name])])
def test_float32_differs_from_the_modules_only_by_the_order_of_sums(name: str) -> None:
    both = Both(name, hidden_layers=(1, 3), dtype=torch.float32)
    for batch, logit_rows in steps():
        ours, theirs = both.run(batch, logit_rows)
        assert ours.logits.dtype is torch.float32
        assert_same(ours.logits, theirs.logits, slack=1e-3)
        assert ours.hidden is not None and theirs.hidden is not None
        assert_same(ours.hidden, theirs.hidden, slack=1e-3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("qwen2", {"quantization": format}) for format in CodeFormat),
        ("llama", {"quantized_head": True}),
        ("llama-biases", {"quantized_head": True}),
        *(("qwen3", {"hidden_layers": layers}) for layers in ((0,), (3,), (2, 0), (1, 2, 3))),
    ],
)
def test_quantized_layers_heads_and_hidden_states_equal_the_modules(
    name: str, options: dict[str, Any]
) -> None:
    """The head of `llama-biases` shares its embeddings' weights."""
    both = Both(name, **options)
    for batch, logit_rows in steps(seed=1):
        ours, theirs = both.run(batch, logit_rows)
        assert_same(ours.logits, theirs.logits)
        if "hidden_layers" in options:
            assert ours.hidden is not None and theirs.hidden is not None
            assert_same(ours.hidden, theirs.hidden)


def test_layers_of_one_input_in_several_formats_are_left_to_the_modules() -> None:
    model = make_model("llama")
    round_linears(model, CodeFormat.INT4)
    attention = model.model.layers[1].self_attn
    attention.k_proj = QuantizedLinear(round_to_nearest(torch.randn(32, 64), CodeFormat.INT8, 64))
    pack_quantized_linears(model)
    assert unfit(describe(model)) == "layer 1 has products of one input that are quantized in several ways"


def test_trees_and_first_keys_equal_the_modules() -> None:
    both = Both("llama")
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(0, 331, (40,), generator=generator).tolist()
    both.run([SequenceRows(prompt, 0, [list(range(5))])], [0])
    masks = [0b1, 0b11, 0b101, 0b1011, 0b10101]
    tree = SequenceRows([5, 6, 7, 8, 9], 40, [list(range(5))], masks=masks, first_key=3)
    ours, theirs = both.run([tree], [0, 1, 2, 3, 4])
    assert_same(ours.logits, theirs.logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    both = Both("llama", dtype=dtype)
    (prompt, _), *_ = steps(seed=2)
    whole = both.native.run(Step(prompt, range(70))).logits
    rows = prompt[0]
    for start, end in itertools.pairwise((0, 1, 2, 7, 40, 70)):
        part = SequenceRows(rows.token_ids[start:end], start, [list(range(16, 24))])
        assert torch.equal(both.native.run(Step([part], range(end - start))).logits, whole[start:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_changing_the_number_of_threads_changes_no_bit(dtype: torch.dtype, threads_restored: None) -> None:
    both = Both("llama", dtype=dtype)
    found = {}
    for threads in (1, 7, 2, 1, 3):
        torch.set_num_threads(threads)
        found[threads] = [both.native.run(Step(*step)).logits for step in steps()]
        assert len(os.listdir("/proc/self/task")) >= threads
    for outputs in found.values():
        assert all(map(torch.equal, outputs, found[1]))


@pytest.mark.parametrize("layers", [(), (1,), (3,)])
def test_logits_of_no_row_and_of_repeated_rows(layers: tuple[int, ...]) -> None:
    both = Both("llama", layers)
    (prompt, _), *_ = steps(seed=3)
    whole = both.native.run(Step(prompt, range(70)))
    rows, blocks = prompt[0], list(range(16, 24))
    nothing = both.native.run(Step([SequenceRows(rows.token_ids[:66], 0, [blocks])], []))
    assert nothing.logits.shape == (0, 331)
    wanted = [3, 1, 3, 0, 2, 3, 3]
    rest = both.native.run(Step([SequenceRows(rows.token_ids[66:], 66, [blocks])], wanted))
    assert torch.equal(rest.logits, whole.logits[66:][wanted])
    if layers:
        assert whole.hidden is not None and nothing.hidden is not None and rest.hidden is not None
        assert torch.equal(torch.cat([nothing.hidden, rest.hidden]), whole.hidden)


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        (SequenceRows([], 4, [[3]]), "starts"),
        (SequenceRows([1, 2], BLOCK - 1, [[3]]), "block_table"),
        (SequenceRows([1], 0, [[NUM_BLOCKS]]), "block_table"),
        (SequenceRows([1], 0, [[3]], first_key=9), "first_key"),
    ],
)
def test_rows_out_of_range_are_refused(rows: SequenceRows, field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is out of range"):
        Both("llama").native.run(Step([rows], [0]))


@pytest.mark.parametrize(
    ("start", "counts", "field"), [(0, [1, 2], "counts"), (0, [0, 0], "counts"), (14, [4, 1], "block_table")]
)
def test_drafts_out_of_range_are_refused(start: int, counts: list[int], field: str) -> None:
    model = make_model("llama")
    decoder = NativeDecoder(Description(describe(model), POSITIONS), new_backend(model))
    batch = RowArrays.of([SequenceRows([1], start, [[block]]) for block in (0, 1)], decoder.block_table)
    with pytest.raises(ValueError, match=f"{field} is out of range"):
        decoder.draft(batch, np.array([[0, 0], counts]), np.zeros(2, np.float32), 331)


def test_unsupported_models_are_named() -> None:
    config = AutoConfig.for_model(
        "gemma",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    with pytest.raises(UndescribedModelError, match="GemmaForCausalLM"):
        describe(AutoModelForCausalLM.from_config(config))
    model = make_model("llama")
    model.config.hidden_act = "relu"
    with pytest.raises(UndescribedModelError, match="relu"):
        describe(model)
