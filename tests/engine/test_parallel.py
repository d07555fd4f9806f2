"""Several ranks give the same bits as one process, and models that cannot be divided are refused."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.pytorch_utils import Conv1D

from engine.assembly import reckoned_step
from engine.batch.runner import Runner, Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import select_backend
from engine.devices.cpu.decoder.native_model import DTYPES
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import TARGET, Group, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.kv.tiers.host import HostMemory
from engine.linear.packed import PackedLinear, pack, packed_rows
from engine.load.select import build_runner, load_packed
from engine.lora.files import read_adapter
from engine.lora.table import adaptable
from engine.model.describe import describe
from engine.parallel import follower, group, messages
from engine.parallel.division import model_share
from engine.parallel.group import DistributedRanks, LostRankError, Meeting, Ranks, SharedRanks
from engine.parallel.messages import BuildRunners, RankCall, RunStep, encode
from engine.parallel.pools import LeadingMemory, LeadingPool, held_pool, rank_layout
from engine.parallel.program_share import program_share
from engine.parallel.runner import ShareRunner, share_of
from kvtransfer.blocks.layout import JoinedBlocks
from protocol.config import ServeConfig
from protocol.requests import Adapter, EngineRequest
from tests.e2e.architectures import ARCHITECTURES, GEMMA4_EXPERTS, VOCAB_SIZE, config_of, write_model
from tests.engine import parallel_child
from tests.engine.adapter_files import write_adapter
from tests.engine.kernels import CPU, needs_kernel
from tests.engine.parallel_child import ANSWER_S, answer, in_child
from tests.worker.harness import request, tiny_config

BLOCK_SIZE = 16


def steps() -> list[tuple[list[SequenceRows], list[int]]]:
    """Return prompts, one in two chunks, with decoding beside them, and the rows whose logits are needed."""
    first, second, third = ([(3 + 7 * i + j * j) % VOCAB_SIZE for j in range(40)] for i in range(3))
    return [
        ([SequenceRows(first[:37], 0, [[5, 1, 2]]), SequenceRows(second[:20], 0, [[0, 3, 4]])], [36, 56]),
        (
            [SequenceRows(first[37:38], 37, [[5, 1, 2]]), SequenceRows(second[20:], 20, [[0, 3, 4]])],
            [0, 19, 20],
        ),
        ([SequenceRows(third[:1], 0, [[6]])], [0]),
    ]


def load(model_type: str, dtype: torch.dtype, **changes: Any) -> LoadedModel:
    """Return a random packed model. `changes` may be options of a server, too."""
    names = {each.name for each in dataclasses.fields(ServeConfig)}
    options = {"compile": "off"} | {name: changes.pop(name) for name in [*changes] if name in names}
    options |= {"device": "cpu", "dtype": str(dtype).removeprefix("torch."), "load_format": "dummy"}
    with tempfile.TemporaryDirectory() as folder:
        config_of(model_type, **changes).save_pretrained(folder)
        return load_packed(ServeConfig(model=folder, max_model_len=512, **options))


def run(loaded: LoadedModel, size: int) -> tuple[list[Tensor], Tensor]:
    """Return each step's logits and the pool's bytes, by one runner or by ranks in threads."""
    pool = KVPool(PoolLayout((loaded.kv_group,), BLOCK_SIZE), 7, CPU, None)
    runners: list[Runner]
    if size == 1:
        backend = select_backend(CPU, loaded.dtype)[0](pool.layers(TARGET), rows=loaded.kv_group.rows)
        runners = [build_runner(loaded, backend, "off")]
    else:
        config, ranks = tiny_config(Path()), SharedRanks(size)
        runners = [ShareRunner(config, loaded, pool, ranks.other(rank), ()) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        outputs = [list(threads.map(lambda runner: runner.run(Step(*step)), runners)) for step in steps()]  # noqa: B023
    for step in outputs:
        assert all(torch.equal(output.logits, step[0].logits) for output in step), "ranks agree"
    return [step[0].logits for step in outputs], pool.memory


def qwen2(heads: int = 6, kv_heads: int = 2, **options: Any) -> dict[str, Any]:
    """Make a shape that the native decoder runs and divides among ranks."""
    shape = {"vocab_size": 330, "head_dim": 16, "hidden_size": 144, "intermediate_size": 200}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"model_type": "qwen2", "compile": "auto"} | shape | heads_of | options


def int_weights(format: str, compile: str) -> dict[str, Any]:
    rounds: dict[str, Any] = {"quantization": format, "quantize_lm_head": True}
    return qwen2(compile=compile, intermediate_size=224, hidden_size=96, **rounds)


SHARED: dict[str, tuple[dict[str, Any], list[int]]] = {
    **{name: ({"model_type": name}, [(2, 4)[at % 2]]) for at, name in enumerate(ARCHITECTURES)},
    **{
        f"{heads} heads, {kv_heads} of keys, {dtype}": (qwen2(heads, kv_heads, dtype=dtype), sizes)
        for heads, kv_heads, sizes in ((4, 2, [2, 4]), (6, 1, [3]), (6, 2, [3]), (6, 3, [2]), (12, 4, [6]))
        for dtype in DTYPES
    },
    "int8 KV": (qwen2(kv_cache_dtype="int8"), [2, 3]),
    "fp8 KV": (qwen2(kv_cache_dtype="fp8"), [2, 3]),
    "int8 weights, modules": (int_weights("int8", "off"), [3]),
    "int8 weights, native decoder": (int_weights("int8", "auto"), [3]),
    "int4 weights, modules": (int_weights("int4", "off"), [3]),
    "int4 weights, native decoder": (int_weights("int4", "auto"), [3]),
    "experts in ranks": ({"model_type": "mixtral", "compile": "auto", "decode_tensor_parallel_size": 2}, [2]),
}
"""Options of `load`, and numbers of ranks. 4 exceeds the KV heads of most models."""


@needs_kernel
@pytest.mark.parametrize("case", SHARED)
def test_ranks_have_the_bits_of_one_process(case: str) -> None:
    options, sizes = SHARED[case]
    loaded = load(**{"dtype": torch.bfloat16} | options)
    is_native = options.get("compile") == "auto" and "decode_tensor_parallel_size" not in options
    assert (loaded.description is not None) == is_native
    expected, pool = run(loaded, 1)
    for size in sizes:
        logits, shared = run(loaded, size)
        assert all(map(torch.equal, logits, expected)), f"{size} ranks"
        assert torch.equal(shared, pool), f"{size} ranks write the same KV"
    assert len({int(row.argmax()) for step in expected for row in step}) > 2, "a test that cannot fail"


def run_program(loaded: LoadedModel, size: int) -> tuple[list[Tensor], Tensor]:
    """Return each step's logits and the bytes of whole blocks, by ranks in threads with own pools."""
    layout = PoolLayout((loaded.kv_group,), BLOCK_SIZE)
    join, config = parallel_child.join_of("gloo", size), tiny_config(Path())

    def work(rank: int) -> tuple[list[Tensor], KVPool]:
        ranks = join(rank)
        pool = KVPool(rank_layout(layout, size, rank), 7, CPU, None)
        runner = ShareRunner(config, share_of(config, loaded, ranks), pool, ranks)
        return [runner.run(Step(*step)).logits.clone() for step in steps()], pool

    with ThreadPoolExecutor(size) as threads:
        done = list(threads.map(work, range(size)))
    held = [held_pool(pool.memory, layout, size, rank) for rank, (_, pool) in enumerate(done)]
    for logits, _ in done:
        assert all(map(torch.equal, logits, done[0][0])), "ranks agree"
    return done[0][0], JoinedBlocks(layout.describe(), held)[:]


QWEN2_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
}
PROGRAMS: dict[str, tuple[dict[str, Any], list[int]]] = {
    **{
        name: ({"model_type": name}, [2, 4])
        for name in ("llama", "gemma3_text", "granite", "mixtral", "gemma4_text")
    },
    "shared experts": ({"model_type": "qwen2_moe", **QWEN2_MOE}, [2]),
    "6 heads, 2 of keys": (qwen2(6, 2, compile="off"), [3]),
    "int8 KV": (qwen2(4, 2, compile="off", kv_cache_dtype="int8"), [2]),
    "int4 weights": (int_weights("int4", "off"), [3]),
}


@needs_kernel
@pytest.mark.parametrize("case", PROGRAMS)
def test_shares_of_a_program_have_the_bits_of_the_whole(case: str) -> None:
    options, sizes = PROGRAMS[case]
    loaded = load(**{"dtype": torch.bfloat16} | options)
    expected, pool = run_program(loaded, 1)
    for logits, theirs in zip(expected, run(loaded, 1)[0], strict=True):
        assert torch.allclose(logits, theirs, rtol=0.1, atol=0.1), "the program is the model"
    for size in sizes:
        logits, blocks = run_program(loaded, size)
        assert all(map(torch.equal, logits, expected)), f"{size} ranks"
        assert torch.equal(blocks, pool), f"{size} ranks keep the same KV"


def test_other_ranks_change_their_pools_alike() -> None:
    layout = PoolLayout((Group.uniform(TARGET, Segment(2, 4, 8, torch.float32)),), 4)
    ours, theirs = socket.socketpair()
    lead = LeadingPool(
        layout, 4, CPU, 2, lambda *call: messages.send(ours, encode(RankCall(call[0], [*call[1:]])))
    )
    other, whole = KVPool(rank_layout(layout, 2, 1), 4, CPU, None), KVPool(layout, 4, CPU, None)
    held = [held_pool(pool.memory, layout, 2, rank) for rank, pool in enumerate((lead, other))]
    joined = JoinedBlocks(layout.describe(), held)
    for pool in (lead, other):
        pool.memory.copy_(torch.randint(256, pool.memory.shape, dtype=torch.uint8))
    whole.memory.copy_(joined[:])
    memory = LeadingMemory(lead, 2, lead._call, lambda: None)
    for pool, host in ((lead, memory), (whole, HostMemory(whole.memory, 2))):
        host.save(2, 1)
        pool.copy_block(0, 3)
        pool.move_tokens([[3, 1]], 2, [4, 5])
        host.load(1, 0)
    ours.close()
    unused: Any = SimpleNamespace(adapters=None)
    follower._obey(unused, other, unused, unused, theirs)
    assert torch.equal(joined[:], whole.memory)
    assert joined[1:3].shape == (2, layout.block_bytes)


def test_other_ranks_divide_layers_like_the_first() -> None:
    loaded = load("gemma2", torch.float32)
    for kept in (loaded.kv_group, loaded.kv_group.in_tables(512)):
        layout = PoolLayout((kept,), BLOCK_SIZE)
        begin = BuildRunners(1, layout.describe(), ())
        assert follower._layout(loaded, begin, BLOCK_SIZE, 0) == layout


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_in_float32_ranks_differ_by_rounding(model_type: str) -> None:
    loaded = load(model_type, torch.float32)
    for logits, expected in zip(run(loaded, 4)[0], run(loaded, 1)[0], strict=True):
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("model_type", "changes"), [("deepseek_v3", {}), ("gemma4_text", GEMMA4_EXPERTS)])
def test_in_float32_shares_of_a_program_differ_by_rounding(model_type: str, changes: dict[str, Any]) -> None:
    """One has latents and shared experts, one norms of experts and of the MLP beside them."""
    loaded = load(model_type, torch.float32, **changes)
    (expected, _), (shared, _) = (run_program(loaded, size) for size in (1, 2))
    for ours, theirs in zip(shared, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_layers_are_divided_in_whole_panels_if_possible() -> None:
    ranks = SharedRanks(3)
    assert ranks.columns(330, 64).parts == (range(128), range(128, 256), range(256, 330))
    assert ranks.columns(100, 64).parts == (range(33), range(33, 66), range(66, 100))


def test_a_share_has_its_own_outputs_and_no_copies() -> None:
    model = AutoModelForCausalLM.from_config(config_of("llama"))
    share: Any = model_share(model, SharedRanks(2, 1))
    whole = model.model.layers[1].mlp.down_proj.weight
    part = share.model.layers[1].mlp.down_proj.part.weight
    assert torch.equal(part, whole[32:])
    assert part.data_ptr() == whole[32:].data_ptr()
    assert type(model.model.layers[1].mlp.down_proj) is nn.Linear, "the whole model is as it was"


def on_ranks(kind: str, size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    join = parallel_child.join_of(kind, size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: work(join(rank)), range(size)))


KINDS = "shared memory", "gloo"


@pytest.mark.parametrize(("kind", "size"), [("shared memory", 3), ("gloo", 2), ("gloo", 4)])
def test_consecutive_gathers_of_any_shape(kind: str, size: int) -> None:
    shapes = [(1, 5), (3, 700), (900, 330), (2, 3, 40), (1, 100_000)] * (20 if kind == "shared memory" else 3)
    wholes = [torch.randn(shape) for shape in shapes]

    def gather(ranks: Ranks) -> bool:
        def is_right(whole: Tensor) -> bool:
            columns = ranks.columns(whole.shape[-1])
            own = columns.parts[ranks.rank]
            return torch.equal(ranks.gather(whole[..., own.start : own.stop], columns), whole)

        return all(map(is_right, wholes))

    assert on_ranks(kind, size, gather) == [True] * size


def test_a_missing_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "GATHER_TIMEOUT_S", 0.05)
    ranks = SharedRanks(2)
    with pytest.raises(LostRankError):
        ranks.gather(torch.ones(1, 4), ranks.columns(8))
    with pytest.raises(LostRankError):
        ranks.other(1).check()


def test_a_rank_that_does_not_come_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "GATHER_TIMEOUT_S", 2.0)  # the ranks first connect

    def gather(ranks: Ranks) -> str:
        ranks.gather(torch.ones(1, 4), ranks.columns(8))
        if ranks.rank:
            return ""
        with pytest.raises(LostRankError) as caught:
            ranks.gather(torch.ones(1, 4), ranks.columns(8))
        return str(caught.value)

    assert on_ranks("gloo", 2, gather)[0].startswith("a rank does not answer: ")


def test_nobody_waits_for_a_lost_rank() -> None:
    ranks = SharedRanks(2)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(ranks.other(1).gather, torch.ones(1, 4), ranks.columns(8))
        ranks.give_up()
        with pytest.raises(LostRankError):
            waiting.result(timeout=group.GATHER_TIMEOUT_S / 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model("llama", folder)
    for seed, name in enumerate(ADAPTERS):
        write_adapter(folder, folder / name, seed)
    return folder


ADAPTERS = ("of the start", "late")


def plain_requests() -> list[EngineRequest]:
    """Return long and short requests, greedy and sampled."""
    prompts = [[3 + (7 * i + j * j) % 300 for j in range(5 + 40 * i)] for i in range(4)]
    sampling: dict[str, Any] = {"logprobs": 5}
    return [
        request(str(i), prompt, 16, temperature=i % 2, seed=i, **sampling) for i, prompt in enumerate(prompts)
    ]


def requests(folder: Path) -> list[EngineRequest]:
    """Return plain requests. The last one also runs first, alone, and with adapters, one of which the worker
    does not have yet.
    """
    batch = plain_requests()
    alone = msgspec.structs.replace(batch[-1], request_id="alone", cache_salt="alone")
    linears = adaptable(AutoModelForCausalLM.from_pretrained(folder))
    for name in ADAPTERS:
        path = str(folder / name)
        adapter = Adapter(name=name, path=path, digest=read_adapter(path, linears, 64).digest)
        batch.append(msgspec.structs.replace(alone, request_id=name, cache_salt="", adapter=adapter))
    return [alone, *batch]


def start(
    folder: Path,
    size: int,
    kind: str = KINDS[0],
    asked: Sequence[EngineRequest] | None = None,
    **options: Any,
) -> Any:
    lora = None if asked else {ADAPTERS[0]: str(folder / ADAPTERS[0])}
    config = tiny_config(folder, lora_modules=lora, **options)
    encoded = [msgspec.msgpack.encode(each) for each in asked or requests(folder)]
    return in_child(parallel_child.run, msgspec.to_builtins(config), size, kind, encoded)


@pytest.mark.parametrize(
    ("kind", "dtype", "compile", "size"),
    [
        ("shared memory", "float32", "off", 2),
        pytest.param("shared memory", "bfloat16", "off", 2, marks=needs_kernel),
        pytest.param("shared memory", "bfloat16", "auto", 4, marks=needs_kernel),
        ("gloo", "float32", "off", 2),
        pytest.param("gloo", "bfloat16", "off", 4, marks=needs_kernel),
    ],
)
def test_ranks_give_the_tokens_of_one_process(
    folder: Path, kind: str, dtype: str, compile: str, size: int
) -> None:
    """With one pool or, by gloo, with pools of their own."""
    pipes = [start(folder, each, kind, dtype=dtype, compile=compile) for each in (1, size)]
    (one, expected, _), (several, results, _) = map(answer, pipes)
    assert several == f"{one}, on {size} ranks"
    tokens, expected_tokens = [{k: r[::2] for k, r in each.items()} for each in (results, expected)]
    assert tokens == expected_tokens
    assert len({token for ids in tokens["0"] for token in ids}) > 4, "a test that cannot fail"
    assert tokens["3"] != tokens[ADAPTERS[0]] != tokens[ADAPTERS[1]] != tokens["3"], "likewise"
    if dtype == "bfloat16":  # some of torch's float32 products have other bits for parts of the outputs
        assert results == expected, "the log-probabilities have the same bits"
        assert results["alone"] == results["3"], "with any batch"


def twice() -> list[EngineRequest]:
    """Return plain requests, and each again after all, to find the blocks of its prompt."""
    once = plain_requests()
    return once + [msgspec.structs.replace(each, request_id=f"{each.request_id} again") for each in once]


HYBRIDS = [
    ("gloo", "qwen3_5_text", 2, "bfloat16"),
    ("gloo", "falcon_h1", 4, "bfloat16"),
    ("gloo", "kimi_linear", 2, "float32"),  # which our kernels do not pack, as on a GPU
    ("shared memory", "qwen3_5_text", 4, "bfloat16"),
]


@needs_kernel
@pytest.mark.parametrize(("kind", "model_type", "size", "dtype"), HYBRIDS)
def test_all_ranks_have_the_states_of_recurrent_layers(
    tmp_path: Path, kind: str, model_type: str, size: int, dtype: str
) -> None:
    write_model(model_type, tmp_path)
    options = {"dtype": dtype, "max_num_seqs": 2, "decode_tensor_parallel_size": size}
    pipes = [start(tmp_path, each, kind, twice(), **options) for each in (1, size)]
    (_, expected, _), (_, results, counters) = map(answer, pipes)
    assert {k: r[::2] for k, r in results.items()} == {k: r[::2] for k, r in expected.items()}
    assert counters["kept_state_hits_total"] > 0
    assert len({token for ids in results["3"][::2] for token in ids}) > 4, "a test that cannot fail"


@needs_kernel
def test_blocks_in_the_host_memory_of_all_ranks_are_found_again(folder: Path) -> None:
    bounds = {"dtype": "bfloat16", "max_num_seqs": 1, "max_model_len": 150, "kv_offloading_size": 2**-6}
    blocks = 12 * 16 * 3 * 2 * 2 * 16 * 2
    pipes = [
        start(folder, each, "gloo", twice(), kv_cache_memory_bytes=blocks // each, **bounds)
        for each in (1, 2)
    ]
    (_, expected, _), (_, results, counters) = map(answer, pipes)
    assert results == expected
    assert counters["kv_host_hit_blocks_total"] > 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_ends_within_a_gather_is_lost_at_once(kind: str) -> None:
    reason, seconds, is_told = answer(in_child(parallel_child.lose_a_rank_in_a_gather, kind))
    assert reason == "a rank does not answer" and is_told
    assert seconds < group.GATHER_TIMEOUT_S / 2


def test_ranks_end_with_their_worker_even_if_they_ignore_it() -> None:
    pipe = in_child(parallel_child.lead_a_deaf_rank)
    leader, rank = answer(pipe)
    os.kill(leader, signal.SIGKILL)
    ended = pipe.poll(ANSWER_S)
    if not ended:
        os.kill(rank, signal.SIGKILL)
    assert ended, "its end of the pipe is open"
    with pytest.raises(EOFError):
        answer(in_child(parallel_child.follow_nobody))


def test_an_adapter_is_on_all_ranks_or_on_none() -> None:
    refusal, dropped = answer(in_child(parallel_child.refuse_an_adapter))
    assert refusal == "rank 2 cannot read it"
    assert sorted(dropped) == [1, 2]


def test_heads_that_cannot_be_divided_are_refused(folder: Path) -> None:
    assert "llama: 4 attention heads cannot be divided among 3" in answer(start(folder, 3))


def test_rows_of_packed_weights() -> None:
    weight = torch.randn(192, 32, dtype=torch.bfloat16)
    packed = pack(weight)
    some = packed_rows(packed, [range(5, 70), range(100, 101)])
    assert torch.equal(some, pack(weight[[*range(5, 70), 100]]))
    panels = packed_rows(packed, [range(64, 192)])
    assert torch.equal(panels, pack(weight[64:]))
    assert panels.data_ptr() == packed[1:].data_ptr(), "whole panels are not copied"


@needs_kernel
def test_a_packed_layer_of_gpt2() -> None:
    linear = Conv1D(96, 32).to(torch.bfloat16)
    nn.init.normal_(linear.bias)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    packed = PackedLinear(linear)
    assert (packed.in_features, packed.out_features) == (32, 96)
    assert torch.allclose(packed(x), linear(x), atol=1e-2, rtol=1e-2)


def test_a_step_is_sent_unchanged() -> None:
    tree = SequenceRows([1, 2, 3], 7, [[4, 5]], [1, 3, 1 << 63], 6, 2)
    sent = RunStep([tree], [0, 2], False)
    got = msgspec.msgpack.decode(encode(sent), type=RunStep)
    rows = got.batch[0]
    assert (got.logit_rows, got.wants_hidden) == ([0, 2], False)
    assert dataclasses.astuple(rows) == dataclasses.astuple(tree)


GPU_BYTES = 85.5e9
"""Memory of a GPU that is sold as one of 80 GB, 81,559 MiB."""


def test_llama_70b_fits_two_gpus() -> None:
    """Weights of a rank, and the tokens that its KV pool then holds, reckoned without memory."""
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    meta = torch.device("meta")
    with meta:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    parts: list[nn.Module] = []

    def keep(part: nn.Module) -> nn.Module:
        parts.append(part)
        return part

    program = program_share(describe(model), DistributedRanks(2, 0, Meeting(), meta), meta, keep)
    weights = program.embeddings.nbytes + sum(w.nbytes for part in parts for w in part.parameters())
    assert weights == pytest.approx(71.6e9, rel=0.01)
    group = Group.uniform(TARGET, Segment(80, 8, 128, torch.bfloat16))
    token_bytes = rank_layout(PoolLayout((group,), 16), 2, 0).block_bytes // 16
    step = reckoned_step(8192, 28672, 128256, torch.bfloat16, num_tokens=2048, rows=256)
    room = 0.9 * GPU_BYTES - weights - 2 * step  # as much again for graphs
    assert room / token_bytes == pytest.approx(17_000, rel=0.02)
