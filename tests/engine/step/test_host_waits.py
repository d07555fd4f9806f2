"""In a forward the host never waits for the GPU (see `absent_gpu`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.batch.runner import Runner, Step
from engine.batch.step_inputs import SequenceRows
from engine.copies import Downloader, Uploader
from engine.devices import recurrent
from engine.devices.cuda import runner as cuda_runner
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder
from engine.devices.cuda.experts import tile_experts
from engine.devices.cuda.runner import CudaRunner
from engine.devices.loaded_model import LoadedModel, RecurrentLayers
from engine.devices.torch import transformers_hook
from engine.devices.torch.recurrent_hooks import hook
from engine.devices.torch.runner import Modules, TorchRunner
from engine.kv.layout import TARGET, Group, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.kv.state_slots import RecurrentLayer, StateLayout
from engine.load import select as select_forward
from engine.load.select import modules_runner
from engine.lora.table import Adapters, Weights, adaptable
from engine.model.describe import describe
from engine.step.draft import LateTokens
from protocol.config import ServeConfig
from protocol.speculation import SpeculativeConfig
from tests.e2e.architectures import config_of
from tests.engine.absent_gpu import GPU, AbsentGpu, absent_gpu

LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 2, 16


def on_gpu(config: PreTrainedConfig) -> PreTrainedModel:
    transformers_hook.register()
    with GPU:
        options = {"dtype": torch.bfloat16, "attn_implementation": transformers_hook.NAME}
        return AutoModelForCausalLM.from_config(config, **options).eval()


def qwen3(num_layers: int = LAYERS, **options: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": DIM, "vocab_size": 512}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return on_gpu(Qwen3Config(num_hidden_layers=num_layers, **sizes | heads | options))


def pool_of(num_layers: int = LAYERS) -> KVPool:
    group = Group.uniform(TARGET, Segment(num_layers, KV_HEADS, DIM, torch.bfloat16))
    return KVPool(PoolLayout((group,), 16), 64, GPU, None)


def runner_of(decoder: CudaDecoder, backend: TritonBackend) -> CudaRunner:
    return CudaRunner(decoder, backend, GPU, "", Buckets.of(ServeConfig(), 1024))


def loaded_of(model: PreTrainedModel, pool: KVPool, adapters: Adapters | None = None) -> LoadedModel:
    group = pool.groups[TARGET]
    return LoadedModel(model, GPU, torch.bfloat16, group, 512, 64, [], "", adapters=adapters)


def warm_runner(loaded: LoadedModel, pool: KVPool, config: ServeConfig = ServeConfig(max_num_seqs=2)) -> Any:
    runner = select_forward.runner_of_one_process(config, loaded, pool, ())
    runner.warm_up()
    return runner


class CountedGraphs:
    def __init__(self, gpu: AbsentGpu) -> None:
        self._gpu = gpu
        self.captured = 0

    def new(self) -> CountedGraphs:
        return self

    def free_bytes(self) -> int:
        return 1 << 30

    def fault(self, work: Callable[[], object]) -> str:
        self._gpu.waits.clear()
        work()
        return next(iter(self._gpu.waits), "")

    def capture(self, work: Callable[[], object]) -> None:
        work()
        self.captured += 1

    def replay(self) -> None:
        self._gpu.launch("graph")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[AbsentGpu]:
    """Simulate a GPU that counts graphs. No real GPU is used."""
    monkeypatch.setattr(select_forward, "backend_for", lambda *_: (TritonBackend, ""))
    with absent_gpu() as gpu:
        monkeypatch.setattr(cuda_runner, "CudaGraphs", lambda device: CountedGraphs(gpu))
        yield gpu


def check_run(gpu: AbsentGpu, runner: Runner, batch: Sequence[SequenceRows], num_logits: int = 2) -> None:
    """Run a step in which the host must not wait. Reading the tokens is the only wait afterwards."""
    gpu.clear()
    assert len(runner.run(Step(batch, range(num_logits))).logits) == num_logits
    gpu.num_done = gpu.num_queued
    assert not gpu.waits, "\n".join(gpu.waits)


DECODE = [SequenceRows([5], 20, [[1, 2]]), SequenceRows([5], 30, [[3, 4]])]
TREES = [SequenceRows([5, 6, 7], 20, [[1, 2]], [1, 3, 5]), SequenceRows([5, 6, 7], 25, [[3, 4]], [1, 3, 5])]
DRAFTING = ServeConfig(
    max_num_seqs=2, speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=2)
)
HYBRID = [
    [SequenceRows([5], 20, [[1, 2]]), SequenceRows([5], 30, [[3, 4]], state_slot=1)],
    [
        SequenceRows([5, 6, 7], 20, [[1, 2]], [1, 3, 5], certain=21),
        SequenceRows([5], 31, [[3, 4]], state_slot=1),
    ],
]


@pytest.mark.parametrize(("batch", "num_logits"), [(DECODE, 2), (TREES, 6)], ids=["decode rows", "trees"])
@pytest.mark.parametrize("kind", ["modules", "CUDA decoder"])
def test_a_forward_never_waits(gpu: AbsentGpu, kind: str, batch: list[SequenceRows], num_logits: int) -> None:
    backend = TritonBackend(pool_of().layers(TARGET))
    if kind == "modules":
        runner: Runner = TorchRunner(Modules(qwen3(), backend), backend, GPU, "off", products="")
    else:
        runner = runner_of(CudaDecoder(describe(qwen3()), backend, 64), backend)
    runner.run(Step(batch, range(num_logits)))  # runs once to make what is made once
    gpu.num_done = gpu.num_queued
    check_run(gpu, runner, batch, num_logits)
    assert gpu.launches["attend"] == LAYERS


def hybrid() -> LoadedModel:
    config = config_of("qwen3_5_text")
    model = on_gpu(config)
    layer = RecurrentLayer(2 * 2 * 16 + 4 * 8, config.linear_conv_kernel_dim, 4, 2, 16, 8)
    state = StateLayout((layer, layer), torch.bfloat16).with_drafts(8)
    group = Group.uniform(TARGET, Segment(3, 2, 16, torch.bfloat16))
    hooks = hook(model)
    assert hooks is not None
    return LoadedModel(
        model, GPU, torch.bfloat16, group, 320, 64, [], "", recurrent=RecurrentLayers(hooks, state)
    )


def hybrid_pool(loaded: LoadedModel) -> KVPool:
    assert loaded.recurrent is not None
    return KVPool(PoolLayout((loaded.kv_group,), 16, loaded.recurrent.state, 3), 64, GPU, None)


def test_a_model_with_recurrent_layers(gpu: AbsentGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, decode rows, and a tree of which some drafts are accepted."""
    loaded = hybrid()
    monkeypatch.setattr(recurrent, "triton_fault", lambda device: None)
    pool = hybrid_pool(loaded)
    assert pool.state_slots is not None
    backend = TritonBackend(pool.layers(TARGET))
    runner = modules_runner(loaded, backend, state_slots=pool.state_slots)
    assert runner.choice == "eager, recurrent layers by triton operators"
    for _ in range(2):
        gpu.clear()
        for batch in ([SequenceRows([5] * 40, 0, [[1, 2, 3]], state_slot=2)], *HYBRID):
            assert len(runner.run(Step(batch, [0, 1])).logits) == 2
        pool.state_slots.move(0, 21, [1])
        gpu.num_done = gpu.num_queued
    assert not gpu.waits, "\n".join(gpu.waits)
    assert gpu.launches["convolve"] == gpu.launches["attend"] - 3 == gpu.launches["keep"] == 6


@pytest.mark.parametrize("adapter", [0, 1])
def test_steps_of_a_model_with_recurrent_layers_are_captured(gpu: AbsentGpu, adapter: int) -> None:
    """Decode rows and drafts to verify are one launch. A prompt is launched kernel by kernel."""
    loaded = hybrid()
    served = replace(loaded, adapters=adapters_of(loaded.model) if adapter else None)
    runner = warm_runner(served, hybrid_pool(loaded), DRAFTING)
    assert runner.choice == f"CUDA decoder, {12 if adapter else 6} graphs"
    drafts = [SequenceRows([5, 6, 7], 31, [[1, 2, 3]], certain=32)]
    prompt = [SequenceRows([5] * 40, 1, [[1, 2, 3]])]
    for batch in (HYBRID[0], drafts, prompt):
        check_run(gpu, runner, [replace(rows, adapter=adapter) for rows in batch])
        if batch is prompt:
            assert gpu.launches["prepare"] == gpu.launches["gate_heads"] == 2 and not gpu.launches["graph"]
            assert (gpu.launches["expand"] > 0) == (adapter > 0)
        else:
            assert gpu.launches == {"graph": 1}


def test_steps_of_a_model_with_experts_are_captured(gpu: AbsentGpu) -> None:
    """A layer's experts are two products, whatever rows chose, between a launch before and the next norm."""
    config = config_of("qwen3_moe")
    model = on_gpu(config)
    tile_experts(model, torch.bfloat16)
    heads, dim = config.num_key_value_heads, config.head_dim
    group = Group.uniform(TARGET, Segment(config.num_hidden_layers, heads, dim, torch.bfloat16))
    pool = KVPool(PoolLayout((group,), 16), 64, GPU, None)
    runner = warm_runner(loaded_of(model, pool), pool, DRAFTING)
    assert runner.choice == "CUDA decoder, 6 graphs"
    check_run(gpu, runner, DECODE)
    assert gpu.launches == {"graph": 1}
    check_run(gpu, runner, [SequenceRows([5] * 40, 1, [[1, 2, 3]])])
    layers = config.num_hidden_layers
    assert [gpu.launches[name] for name in ("route", "multiply")] == [layers, 2 * layers]


def test_which_models_it_runs(gpu: AbsentGpu) -> None:
    pool = pool_of()
    loaded = loaded_of(qwen3(), pool)

    def choice(**options: Any) -> str:
        runner = select_forward.runner_of_one_process(
            ServeConfig(max_num_seqs=2, **options), loaded, pool, ()
        )
        assert runner.warm_up() > 0.0
        return runner.choice

    assert choice() == "CUDA decoder, 2 graphs"
    assert choice(enforce_eager=True) == "CUDA decoder, eager"
    attention = TritonBackend(pool.layers(TARGET))
    drafting = select_forward.runner_of(ServeConfig(max_num_seqs=2), loaded, attention, drafts=True)
    assert drafting.warm_up() > 0.0 and drafting.choice == "CUDA decoder, 4 graphs"
    uncompiled = select_forward.runner_of_one_process(ServeConfig(compile="off"), loaded, pool, ())
    assert isinstance(uncompiled, TorchRunner)
    loaded.model.config.hidden_act = "gelu"
    assert choice() == "the model's own modules, 2 graphs"
    loaded.model.model.norm.register_forward_hook(lambda module, args, out: out * out.max().item())
    assert choice().startswith(
        "the model's own modules, eager (not to be captured: /engine/devices/torch/runner.py"
    )


def late_tokens() -> LateTokens:
    return LateTokens(torch.empty(2, dtype=torch.int64, device=GPU), Downloader(GPU))


def test_a_server_with_adapters_launches_no_more_for_requests_without(gpu: AbsentGpu) -> None:
    """It replays a graph, and before it the decoder's launches for a step without adapters."""
    launches: list[dict[str, int]] = []
    for has_adapters in (False, True):
        model, pool = qwen3(), pool_of()
        adapters = Adapters(adaptable(model), GPU, torch.bfloat16, 64) if has_adapters else None
        loaded = loaded_of(model, pool, adapters)
        runner = warm_runner(loaded, pool)
        gpu.clear()
        runner.run(Step([SequenceRows([5] * 20, 0, [[1, 2]])], [19]))
        assert not gpu.launches["graph"] and gpu.launches["rotate"] == LAYERS
        runner.run(Step(DECODE, [0, 1]), late_tokens().fill)
        assert gpu.launches["graph"] == 1
        assert not gpu.waits, "\n".join(gpu.waits)
        launches.append(dict(gpu.launches))
    assert launches[0] == launches[1]


def adapters_of(model: PreTrainedModel) -> Adapters:
    """Return adapters with one in slot 1."""
    adapters = Adapters(adaptable(model), GPU, torch.bfloat16, 64)
    table = torch.empty((len(adapters.linears), 3), dtype=torch.int64, device=GPU)
    adapters._weights[1] = Weights({}, "", "", table)
    return adapters


@pytest.mark.parametrize("decoder", ["CUDA decoder", "the model's own modules"])
def test_a_step_with_adapters_is_one_launch(
    gpu: AbsentGpu, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes drafts to verify. In a prompt each product takes two more launches."""
    if decoder != "CUDA decoder":
        monkeypatch.setattr(cuda_runner, "unfit", lambda *_, **__: "for a test")
    model, pool = qwen3(), pool_of()
    loaded = loaded_of(model, pool, adapters_of(model))
    runner = warm_runner(loaded, pool, DRAFTING)
    assert runner.choice == f"{decoder}, 12 graphs"
    decode = [replace(DECODE[0], adapter=1), DECODE[1]]
    drafts = [SequenceRows([5, 6, 7], 20, [[1, 2]], adapter=1)]
    prompt = [SequenceRows([5] * 20, 0, [[1, 2]], adapter=1)]
    products = 4 if decoder == "CUDA decoder" else 7
    for batch in (decode, drafts, prompt):
        check_run(gpu, runner, batch)
        assert gpu.uploads == 1
        if batch is prompt:
            assert gpu.launches["shrink"] == gpu.launches["expand"] == products * LAYERS
        else:
            assert gpu.launches == {"graph": 1}
    gpu.clear()
    runner.run(Step(decode, [0, 1]), late_tokens().fill)
    assert gpu.launches["graph"] == 1 and not gpu.launches["shrink"]
    assert not gpu.waits, "\n".join(gpu.waits)


def test_pinned_memory_is_left_alone_while_it_is_copied(gpu: AbsentGpu) -> None:
    upload = Uploader(GPU)
    for _ in range(3):
        gpu.launch("a step before the copy")
        upload([np.zeros(4)])
    used = [each.buffer.data_ptr() for each in upload._pinned]
    assert len(set(used)) == 3
    gpu.num_done = gpu.num_queued
    for _ in range(2):
        upload([np.zeros(3)])
    assert [each.buffer.data_ptr() for each in upload._pinned] == [used[2], *used[:2]]
    assert not gpu.waits


def test_uploads_of_all_sizes_reach_their_tensors(gpu: AbsentGpu) -> None:
    short, long = np.arange(3), np.arange(40, dtype=np.int32).reshape(5, 8).T
    upload = Uploader(GPU)
    cases: list[list[np.ndarray]] = [[short, short], [short.astype(np.float64), short], [short, long]]
    for arrays in (*cases, [short, short]):
        tensors = upload(arrays)
        uploaded = upload._pinned[-1].bytes
        for array, tensor in zip(arrays, tensors, strict=True):
            assert (tensor.dtype, tensor.shape) == (torch.from_numpy(array).dtype, array.shape)
            start = tensor.storage_offset() * array.itemsize
            assert start % 16 == 0 and tensor.is_contiguous()
            assert uploaded[start : start + array.nbytes].tobytes() == array.tobytes()
        assert tensors[1].storage_offset() * arrays[1].itemsize >= arrays[0].nbytes


def test_waits_are_reported_with_their_line(gpu: AbsentGpu) -> None:
    values = torch.empty(4, device=GPU)
    flags = values > 0
    for wait in (
        lambda: values.tolist(),
        lambda: values[0].item(),
        lambda: flags.nonzero(),
        lambda: values[flags],
        lambda: values[[1, 2]],
        lambda: torch.tensor([1.0], device=GPU),
        lambda: torch.zeros(4).to(GPU),
        lambda: values.copy_(torch.zeros(4), non_blocking=True),
    ):
        gpu.clear()
        wait()
        ((line, count),) = gpu.waits.items()
        assert count == 1 and "test_host_waits.py" in line
