"""The runner of a server with adapters on a GPU.

Graphs come from `recorder.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.batch.runner import Runner, Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.cuda import runner as cuda_runner
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder
from engine.devices.cuda.products import TiledLinear, tile_linears
from engine.devices.cuda.runner import CudaRunner
from engine.devices.loaded_model import LoadedModel
from engine.devices.torch.runner import Modules
from engine.kv.layout import TARGET
from engine.kv.pool import KVPool
from engine.load.rounding import round_linears
from engine.load.select import modules_runner, runner_of
from engine.lora.layers import begin_step
from engine.lora.table import NOTHING, Adapters, adaptable
from engine.model.describe import describe
from engine.quantization.weight import CodeFormat
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig
from speculation import self_speculative as drafts
from speculation.self_speculative import SelfDrafter, with_layers
from tests.engine.adapter_files import write_adapter
from tests.engine.interpreted.graphs import CPU, STEPS, chain, made_model, made_pool
from tests.engine.interpreted.hybrid_graphs import Side as HybridSide
from tests.engine.interpreted.hybrid_graphs import made, rows_of
from tests.engine.interpreted.recorder import RecordedGraphs

CONFIG = ServeConfig(model="qwen3", compile="auto")
BUCKETS, ADAPTED_BUCKETS = (Buckets([2], [1], [6], trees=False, adapters=each) for each in (False, True))
OTHERS = slice(3 * 6, 4 * 6)
"""The blocks of `chain(3, ...)`, the only sequence with an adapter here."""


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    made_model().save_pretrained(folder)
    return write_adapter(folder, folder / "one", 1)


@pytest.fixture(autouse=True)
def nothing_is_left_to_add() -> Iterator[None]:
    yield
    begin_step(())


class Side:
    """The runner of a server with an adapter in slot 1, or without `--enable-lora`."""

    def __init__(
        self,
        adapter: Path | None,
        monkeypatch: pytest.MonkeyPatch,
        replays: bool = False,
        adapted_buckets: Buckets = ADAPTED_BUCKETS,
    ) -> None:
        self.pool, self.graphs, self.model = made_pool(), RecordedGraphs(), made_model()
        monkeypatch.setattr(cuda_runner, "graphs_for", lambda *_: self.graphs if replays else None)
        monkeypatch.setattr(Buckets, "of", lambda *given: adapted_buckets if given[2] else BUCKETS)
        self.loaded = loaded_of(self.model, self.pool, adapter)
        backend = TritonBackend(self.pool.layers(TARGET))
        runner = runner_of(CONFIG, self.loaded, backend)
        assert isinstance(runner, CudaRunner)
        self.runner = runner
        runner.warm_up()

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs.graphs)

    @property
    def adapters(self) -> Adapters:
        assert self.loaded.adapters is not None
        return self.loaded.adapters

    @property
    def kv(self) -> Tensor:
        """Return the KV except `OTHERS`."""
        kept = torch.ones(len(self.pool.memory), dtype=torch.bool)
        kept[OTHERS] = False
        return self.pool.memory[kept]


def loaded_of(model: PreTrainedModel, pool: KVPool, adapter: Path | None) -> LoadedModel:
    adapters = None
    if adapter is not None:
        adapters = Adapters(adaptable(model), CPU, torch.float32, 64)
        assert adapters.acquire(adapters.load("one", str(adapter))) == 1
    group = pool.groups[TARGET]
    return LoadedModel(model, CPU, torch.float32, group, 60, 128, [], "", adapters=adapters)


def logits_of(runner: Runner, batch: Sequence[SequenceRows], logit_rows: Sequence[int]) -> Tensor:
    return runner.run(Step(batch, logit_rows)).logits.clone()


def adapted(start: int, *token_ids: int) -> SequenceRows:
    return replace(chain(3, start, *token_ids), adapter=1)


PROMPT = chain(0, 16, *range(1, 41))
PLAIN = [STEPS[0], STEPS[1], STEPS[3], ([PROMPT], [39], 0)]
ADAPTED = [[adapted(0, 5, 6, 7)], [adapted(3, 8)], [adapted(4, 9)]]


MODULES = "the model's own modules"


@pytest.fixture
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the decoder and return its name."""
    name: str = getattr(request, "param", "CUDA decoder")
    if name == MODULES:
        monkeypatch.setattr(cuda_runner, "unfit", lambda *_, **__: "for a test")
    return name


def test_steps_without_adapters_equal_those_of_a_server_without(
    decoder: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, with the same number of replays, whatever ran with adapters in between."""
    plain, ours = (Side(each, monkeypatch, replays=True) for each in (None, adapter))
    assert [side.runner.choice for side in (plain, ours)] == [f"{decoder}, {n} graphs" for n in (1, 2)]
    for number, (batch, logit_rows, _) in enumerate(PLAIN):
        before = plain.num_replays, ours.num_replays
        expected = logits_of(plain.runner, batch, logit_rows)
        assert torch.equal(logits_of(ours.runner, batch, logit_rows), expected)
        assert torch.equal(ours.kv, plain.kv)
        assert ours.num_replays - before[1] == plain.num_replays - before[0] == (number < 3)
        if number < 3:
            replays = ours.num_replays
            ours.runner.run(Step(ADAPTED[number], [0]))
            assert ours.num_replays == replays + (number > 0)


@pytest.mark.parametrize(
    ("decoder", "replays"), [("CUDA decoder", False), (MODULES, True)], indirect=["decoder"]
)
def test_steps_with_adapters_equal_torchs_operators(
    decoder: str, replays: bool, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without adapters read KV that steps without adapters have written."""
    ours = Side(adapter, monkeypatch, replays)
    model, pool = made_model(), made_pool()
    loaded = loaded_of(model, pool, adapter)
    modules = modules_runner(loaded, TritonBackend(pool.layers(TARGET)))
    steps = [
        ([chain(0, 10, 3), chain(1, 40, 5)], [0, 1]),
        ([chain(0, 11, 4), adapted(0, 5, 6, 7)], [0, 3]),
        ([chain(0, 12, 6)], [0]),
        ([adapted(3, 8), chain(0, 13, 6), chain(1, 41, 2)], [0, 1, 2]),
    ]
    for batch, logit_rows in steps:
        expected = logits_of(modules, batch, logit_rows)
        found = logits_of(ours.runner, batch, logit_rows)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        values = (each.memory.view(torch.float32) for each in (ours.pool, pool))
        torch.testing.assert_close(*values, atol=1e-5, rtol=1e-5)
    assert ours.num_replays == 2 * replays
    without = logits_of(ours.runner, [replace(adapted(3, 8), adapter=0)], [0])
    assert not torch.allclose(without, expected[:1], atol=1e-2)


def test_a_replay_equals_the_launched_step(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit: rows with several adapters and without, padding, and drafts to verify."""
    buckets = Buckets([2], [1, 3], [6], trees=False, adapters=True)
    eager, replayed = (Side(adapter, monkeypatch, replays, buckets) for replays in (False, True))
    other = write_adapter(adapter.parent, adapter.parent / "other", 2, rank=9, targets=("q_proj", "up_proj"))
    for side in (eager, replayed):  # after the graphs were captured
        assert side.adapters.acquire(side.adapters.load("other", str(other))) == 2
    steps = [
        [adapted(0, 5)],
        [adapted(1, 6), replace(chain(0, 10, 3), adapter=2)],
        [chain(0, 11, 4), adapted(2, 8)],
        [replace(chain(1, 40, 5), adapter=2), chain(0, 12, 6)],
        [replace(chain(1, 41, 5, 6, 7), adapter=2), adapted(3, 8, 9)],
    ]
    for number, batch in enumerate(steps):
        logit_rows = range(sum(len(rows.token_ids) for rows in batch))
        expected, found = (logits_of(side.runner, batch, logit_rows) for side in (eager, replayed))
        assert torch.equal(found, expected)
        assert torch.equal(replayed.pool.memory, eager.pool.memory)
        assert replayed.num_replays == number + 1
    untouched = chain(4, 10, 3)
    found = logits_of(replayed.runner, [adapted(5, 7), replace(untouched, adapter=2)], [1])
    alone = logits_of(Side(other, monkeypatch).runner, [replace(untouched, adapter=1)], [0])
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)


def test_adapters_work_with_quantized_weights(adapter: Path) -> None:
    """Products use tiles, and one layer's product is joined with others'."""
    models, pools = [made_model(), made_model()], [made_pool(), made_pool()]
    for model in models:
        round_linears(model, CodeFormat.INT4)
    theirs, ours = (loaded_of(model, pool, adapter) for model, pool in zip(models, pools, strict=True))
    tile_linears(models[1], torch.float32, plain=True)
    assert isinstance(models[1].model.layers[0].self_attn.q_proj, TiledLinear)
    backends = [TritonBackend(pool.layers(TARGET)) for pool in pools]
    modules = modules_runner(theirs, backends[0])
    decoder = CudaDecoder(describe(models[1]), backends[1], 128, adapters=ours.adapters)
    runner = CudaRunner(decoder, backends[1], CPU, "", ADAPTED_BUCKETS)
    for batch in ([adapted(0, 5, 6, 7), chain(0, 16, 3)], [adapted(3, 8)]):
        expected, found = (logits_of(each, batch, [0]) for each in (modules, runner))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(logits_of(runner, [replace(batch[0], adapter=0)], [0]), found, atol=1e-2)
        logits_of(runner, batch, [0])  # its KV is the adapter's again


@pytest.mark.parametrize("decoder", ["CUDA decoder", MODULES], indirect=True)
def test_rows_of_an_empty_slot_equal_rows_without_adapters(
    decoder: str, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial of a step's memory has such rows."""
    ours = Side(adapter, monkeypatch)
    expected = logits_of(ours.runner, [chain(0, 10, 3, 4)], [0, 1])
    nothing = replace(chain(0, 10, 3, 4), adapter=NOTHING)
    assert torch.equal(logits_of(ours.runner, [nothing], [0, 1]), expected)


def test_a_model_with_recurrent_layers(tmp_path: Path) -> None:
    """Replayed bit by bit as launched, by the model's own modules, and as torch's operators add."""
    model_type = "nemotron_h"
    loaded = made.__wrapped__(model_type)
    loaded.model.save_pretrained(tmp_path)
    adapters = Adapters(adaptable(loaded.model), CPU, torch.float32, 64)
    adapters.load("one", str(write_adapter(tmp_path, tmp_path / "one", 1, strength=0.1)))
    loaded = replace(loaded, adapters=adapters)
    buckets, graphs = Buckets([3], [1], [6], trees=False, adapters=True), RecordedGraphs()
    eager, replayed = (HybridSide(model_type, buckets, each, loaded=loaded) for each in (None, graphs))
    torchs = HybridSide(model_type, buckets, loaded=loaded)
    torchs.runner = modules_runner(loaded, torchs.backend, state_slots=torchs.state_slots)
    for number in range(3):
        batch = [replace(rows_of(state_slot, number, 1), adapter=state_slot % 2) for state_slot in range(3)]
        expected = eager.logits(batch)
        assert torch.equal(replayed.logits(batch), expected)
        assert all(map(torch.equal, replayed.memory, eager.memory))
        torch.testing.assert_close(torchs.logits(batch), expected, atol=1e-5, rtol=1e-5)
    assert sum(graph.num_replays for graph in graphs.graphs) == 3 and len(graphs.graphs) == 2
    plain = [replace(rows, adapter=0) for rows in batch]
    assert not torch.allclose(eager.logits(plain)[1], expected[1], atol=1e-3)


def test_no_weight_is_stored_twice(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even in a draft that uses some of the layers and is made before the runner."""
    model, pool = made_model(), made_pool()
    loaded = loaded_of(model, pool, adapter)
    target = replace(loaded, device=torch.device("cuda"))
    drafter = SelfDrafter(SpeculativeConfig(method="self_speculative", skip_layers=[1]), CONFIG, target)
    monkeypatch.setattr(cuda_runner, "graphs_for", lambda *_: None)
    assert runner_of(CONFIG, loaded, TritonBackend(pool.layers(TARGET))) is not None
    held = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in weights(model)}
    assert sum(each.nbytes() for each in held.values()) == sum(each.nbytes for each in weights(model))
    mlp = model.model.layers[0].mlp
    gate, up = mlp.gate_proj.weight, mlp.up_proj.weight
    assert up.untyped_storage().data_ptr() == gate.data_ptr() != up.data_ptr()
    monkeypatch.setattr(drafter, "_build_runner", lambda pool: None)
    monkeypatch.setattr(drafts, "ChainDrafting", lambda *_: None)
    drafter.attach(loaded, pool)
    part = weights(drafter._loaded.model)
    assert part and {each.untyped_storage().data_ptr() for each in part} <= {*held}


def test_a_draft_of_the_models_layers_adds_nothing(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although its layers are copies of some with adapters."""
    found = []
    for each in (None, adapter):
        side = Side(each, monkeypatch)
        if each is not None:
            side.runner.run(Step([adapted(0, 5)], [0]))
        backend = TritonBackend(side.pool.layers(TARGET))
        layers = Modules(with_layers(side.model, [1]), backend)
        runner = CudaRunner(layers, backend, CPU, "", BUCKETS)
        found.append(logits_of(runner, [chain(0, 10, 3)], [0]))
    assert torch.equal(*found)


def weights(model: PreTrainedModel) -> list[Tensor]:
    """Return the weights, without those that are both embeddings and head."""
    return [*{each.data_ptr(): each for each in model.parameters()}.values()]
