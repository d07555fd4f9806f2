"""Hybrids in the native decoder equal Transformers' modules over our operators, and their rows keep their
bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engine.batch.runner import Runner, Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import backend_over, select_backend
from engine.devices.cpu.attention.backend import CpuBackend
from engine.devices.cpu.decoder.description import unfit
from engine.kv.layout import TARGET, PoolLayout
from engine.kv.pool import KVPool
from engine.kv.state_slots import GRID, RecurrentLayer, StateLayout, StateSlots
from engine.load.loader import load_model
from engine.load.select import build_runner, runner_of
from engine.model.describe import UndescribedModelError, describe
from native.build import BuildError
from protocol.config import ServeConfig
from protocol.requests import Adapter
from tests.e2e.architectures import VOCAB_SIZE, config_of, write_model
from tests.engine.adapter_files import write_adapter
from tests.engine.devices.test_decoder import assert_same, most_swaps
from tests.engine.devices.test_recurrent import needs_hooks
from tests.engine.kernels import CPU, needs_kernel

BLOCK, NUM_BLOCKS, DRAFTS = 16, 24, 32
LAYOUT = StateLayout((RecurrentLayer(8, 4),), torch.bfloat16)
_FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MULTIPLIED: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_in_multiplier": 0.7,
    "key_multiplier": 0.6,
    "attention_out_multiplier": 1.7,
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.6, 1.4, 0.7, 1.3, 0.8],
    "ssm_out_multiplier": 0.4,
    "mlp_multipliers": [0.7, 1.4],
    "lm_head_multiplier": 0.3,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "qwen3_next": {"num_experts": 6, **_FEW},
    "lfm2": {"conv_bias": True},
    "bamba": {"time_step_limit": (0.5, 1.5)},
    "granitemoehybrid": {"num_local_experts": 0, "residual_multiplier": 0.4, "logits_scaling": 4.0},
    "granite-experts": {"model_type": "granitemoehybrid", "residual_multiplier": 0.4},
    "lfm2_moe": {
        "num_experts": 6,
        **_FEW,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    "nemotron_h": {"time_step_min": 0.5},
    "nemotron-experts": {
        "model_type": "nemotron_h",
        "layer_types": ["linear_attention", "full_attention", "moe", "mlp"],
        "n_routed_experts": 8,
        **_FEW,
        "n_group": 4,
        "topk_group": 2,
        "moe_shared_expert_intermediate_size": 64,
        "routed_scaling_factor": 1.5,
    },
    "kimi_linear": {**_FEW, "num_experts": 8, "num_expert_group": 4, "topk_group": 2},
    "kimi_linear-whole_queries": {
        "model_type": "kimi_linear",
        "mlp_layer_types": ["dense"] * 3,
        "q_lora_rank": None,
        "rms_norm_eps": 4.0,  # the norm of latents has its own
    },
    "falcon_h1": MULTIPLIED | {"mamba_proj_bias": True, "projectors_bias": True, "mlp_bias": True},
    "falcon_h1-normed": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
    "falcon_h1-normed-first": {"mamba_rms_norm": True, "mamba_norm_before_gate": True},
}
"""By name, which begins with the model type unless given: differences from the type's small model."""
EXPANDED = [name for name in MODELS if name.startswith("kimi_linear")]
"""With adapters these keep keys and values, which the native decoder leaves to the modules."""
FLOAT32 = [name for name, fields in MODELS.items() if not {"num_experts", "n_routed_experts"} & {*fields}]
FLOAT32.remove("granite-experts")
"""Experts are left to the modules there."""
CASES = [(name, None) for name in MODELS]
CASES += [("qwen3_5_text", "int8"), ("qwen3_next", "int4"), ("kimi_linear", "int4"), ("falcon_h1", "int8")]
"""With the format of quantized weights, whose products do not depend on the batch's other rows."""

pytestmark = [needs_hooks, needs_kernel]


class Model:
    """A runner, and the state slots of its sequences."""

    def __init__(
        self, folder: Path, compile: str, hidden_layers: tuple[int, ...] = (), **changes: Any
    ) -> None:
        options = {"dtype": "bfloat16", "device": "cpu", "max_model_len": 256} | changes
        config = ServeConfig(model=str(folder), **options)
        loaded = load_model(config)
        assert loaded.recurrent is not None
        layout = loaded.recurrent.state.with_drafts(DRAFTS)
        pool = KVPool(PoolLayout((loaded.kv_group,), BLOCK), NUM_BLOCKS, CPU, None)
        backend_class, _ = select_backend(CPU, loaded.dtype, "auto")
        backend = backend_over(backend_class, pool.layers(TARGET), pool.groups[TARGET])
        assert isinstance(backend, CpuBackend)
        self.adapters = loaded.adapters
        self.state_slots = StateSlots(layout, 3, CPU)
        self.pool = pool
        self.runner: Runner = build_runner(loaded, backend, compile, hidden_layers, self.state_slots)

    def logits(self, batch: list[SequenceRows]) -> Tensor:
        """Return the logits of all rows."""
        return self.runner.run(Step(batch, range(sum(len(rows.token_ids) for rows in batch)))).logits

    def kept(self) -> list[Tensor]:
        """Return the KV and the states of the sequence in the first state slot, which has the first
        blocks.
        """
        states = [part[0] for layer in self.state_slots.layers for part in layer if part.numel()]
        return states + [side.values[:3] for layer in self.pool.layers(TARGET) for side in layer.sides]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write models with norms, biases and per-head parameters that have an effect."""
    found = {}
    for name, changes in MODELS.items():
        found[name] = tmp_path_factory.mktemp(name)
        fields = {"model_type": name.split("-")[0]} | changes
        write_model(folder=found[name], **fields)
        model = AutoModelForCausalLM.from_pretrained(found[name])
        for weight in (*model.parameters(), *_preferences(model)):
            if weight.ndim == 1:
                weight.data += 0.3 * torch.randn_like(weight)
        model.save_pretrained(found[name])
    return found


def _preferences(model: nn.Module) -> list[Tensor]:
    """Return the routers' biases."""
    return [buffer for name, buffer in model.named_buffers() if name.endswith("bias")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def native(folders: dict[str, Path], request: pytest.FixtureRequest) -> Model:
    model_type, quantization = request.param
    return Model(folders[model_type], "auto", quantization=quantization)


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def rows_of(
    text: Sequence[int], start: int, end: int, state_slot: int = 0, certain: int | None = None
) -> SequenceRows:
    blocks = list(range(8 * state_slot, 8 * state_slot + 8))
    return SequenceRows(text[start:end], start, [blocks], state_slot=state_slot, certain=certain)


@pytest.mark.parametrize(("model_type", "quantization"), CASES)
def test_logits_hidden_states_and_stored_states_equal_the_modules(
    folders: dict[str, Path], model_type: str, quantization: str | None
) -> None:
    """In chunks, with another text, with drafts that are all wrong, and as a tree. States and KV have the
    modules' layout, since workers may continue each other's sequences.
    """
    folder, layers = folders[model_type], (1, 3)
    ours, theirs = (Model(folder, mode, layers, quantization=quantization) for mode in ("auto", "off"))
    assert (ours.runner.choice, theirs.runner.choice[:5]) == ("native decoder", "eager")
    one, other = tokens(100), tokens(60, 1)
    masks = [0b1, 0b11, 0b101, 0b1011]
    batches = [
        [rows_of(one, 0, 70)],
        [rows_of(one, 70, 71), rows_of(other, 0, 40, 1)],
        [rows_of(one, 71, 76, certain=73), rows_of(other, 40, 41, 1)],
        [SequenceRows([5, 6, 7, 8], 73, [list(range(8))], masks=masks, certain=74)],
    ]
    swaps = most_swaps(MODELS[model_type])
    for batch in batches:
        wanted = [0, sum(len(rows.token_ids) for rows in batch) - 1]
        found, expected = (model.runner.run(Step(batch, wanted)) for model in (ours, theirs))
        assert_same(found.logits, expected.logits, slack=2, swaps=swaps)
        assert found.hidden is not None and expected.hidden is not None
        assert_same(found.hidden, expected.hidden, slack=2, swaps=swaps)
        if batch is batches[0] and quantization is None:
            for kept, like in zip(ours.kept(), theirs.kept(), strict=True):
                assert like.any()
                assert_same(kept, like, slack=2, swaps=swaps)


@pytest.mark.parametrize("model_type", FLOAT32)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_float32_differs_from_the_modules_only_by_the_order_of_sums(
    folders: dict[str, Path], model_type: str, quantization: str | None
) -> None:
    ours, theirs = (
        Model(folders[model_type], mode, dtype="float32", quantization=quantization)
        for mode in ("auto", "off")
    )
    assert (ours.runner.choice, theirs.runner.choice[:5]) == ("native decoder", "eager")
    text = tokens(76)
    for batch in ([rows_of(text, 0, 70)], [rows_of(text, 70, 76), rows_of(tokens(40, 1), 0, 40, 1)]):
        assert_same(ours.logits(batch), theirs.logits(batch), slack=1e-3)


def bits(model: Model, text: Sequence[int]) -> Tensor:
    """Return the bits of its rows alone and together."""
    return model.logits([rows_of(text, 0, len(text))])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_do_not_depend_on_chunks_and_batch(
    native: Model, threads: int, threads_restored: None
) -> None:
    text, mates = tokens(75), [tokens(90, 1), tokens(90, 2)]
    torch.set_num_threads(1)
    whole = bits(native, text)
    torch.set_num_threads(threads)
    found = []
    for number, (start, end) in enumerate(itertools.pairwise((0, 1, 2, 17, 32, 33, 70, 75))):
        company = [rows_of(mate, 5 * number, 5 * number + 5, 1 + i) for i, mate in enumerate(mates)]
        batch = [*company[: number % 3], rows_of(text, start, end), *company[number % 3 :]]
        before = 5 * (number % 3)
        found.append(native.logits(batch)[before : before + end - start])
    assert torch.equal(torch.cat(found), whole)


def test_drafts_get_the_bits_of_committed_rows_and_leave_nothing_behind(native: Model) -> None:
    """Across a grid point: a chain with one right draft, then a tree with the right ones on one path."""
    text, wrong = tokens(60), tokens(60, 9)
    whole = bits(native, text)
    native.logits([rows_of(text, 0, 29)])
    chain = [*text[:31], *wrong[31:40]]
    assert torch.equal(native.logits([rows_of(chain, 29, 40, certain=30)])[:2], whole[29:31])
    tree = SequenceRows(
        [text[31], wrong[0], text[32], wrong[1], text[33]],
        31,
        [list(range(8))],
        masks=[0b1, 0b11, 0b101, 0b1011, 0b10101],
        certain=32,
    )
    assert torch.equal(native.logits([tree])[[0, 2, 4]], whole[31:34])
    assert torch.equal(native.logits([rows_of(text, 32, 60)]), whole[32:60])


@pytest.mark.parametrize("model_type", [name for name in MODELS if name not in EXPANDED])
def test_adapters_equal_the_modules(folders: dict[str, Path], model_type: str, tmp_path: Path) -> None:
    """Adapters of all linear layers, in a batch with two of them and without."""
    folder = folders[model_type]
    paths = [write_adapter(folder, tmp_path / f"{seed}", seed, rank=4 * seed) for seed in (1, 2)]
    found = []
    for mode in ("auto", "off"):
        model = Model(folder, mode, enable_lora=True)
        assert model.adapters is not None
        slots = [model.adapters.require(Adapter(name="", path=str(path), digest="")) for path in paths]
        assert slots == [1, 2]
        batch = [rows_of(tokens(30, seed), 0, 30, seed) for seed in range(3)]
        batch[0].adapter, batch[2].adapter = slots
        found.append((model.runner.choice, model.logits(batch)))
    assert found[0][0] == "native decoder"
    assert_same(found[0][1], found[1][1], slack=2, swaps=most_swaps(MODELS[model_type]))


@pytest.mark.parametrize("model_type", EXPANDED)
def test_latents_that_adapters_expand_are_left_to_the_modules(
    folders: dict[str, Path], model_type: str
) -> None:
    assert Model(folders[model_type], "auto", enable_lora=True).runner.choice.startswith("eager")
    model = AutoModelForCausalLM.from_pretrained(folders[model_type])
    with pytest.raises(UndescribedModelError, match="layer 2 keeps keys and values, not latents"):
        describe(model)


def test_a_failed_build_of_the_operators_leaves_the_model_to_the_modules(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr("engine.load.select.kernels", fail)
    assert Model(folders["lfm2"], "auto").runner.choice.startswith("eager")


def test_convolutions_longer_than_the_grid_are_left_to_the_modules() -> None:
    config = config_of("qwen3_5_text", linear_conv_kernel_dim=GRID + 2)
    model = AutoModelForCausalLM.from_config(config)
    assert unfit(describe(model)) == f"layer 0 has a convolution of {GRID + 2} tokens, of at most {GRID + 1}"


def test_experts_on_latents_are_left_to_the_modules() -> None:
    fields = MODELS["nemotron-experts"] | {"moe_latent_size": 32}
    model = AutoModelForCausalLM.from_config(config_of(**fields))
    with pytest.raises(UndescribedModelError, match="its experts work on latents"):
        describe(model)


def test_hybrids_use_the_same_runner_on_cuda_with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    cuda = SimpleNamespace(runner_of=lambda *options: asked.append(options))
    monkeypatch.setattr("engine.load.select.importlib.import_module", lambda name: cuda)
    plain, adapted = (SimpleNamespace(adapters=each, recurrent="some") for each in (None, "some"))
    attention: Any = SimpleNamespace(can_capture=True)
    config, state_slots = ServeConfig(model="hybrid", compile="auto"), StateSlots(LAYOUT, 1, CPU)
    for loaded in (adapted, plain):
        runner_of(config, loaded, attention, state_slots=state_slots)  # type: ignore[arg-type]
    assert asked == [(config, each, attention, (), state_slots, False) for each in (adapted, plain)]
