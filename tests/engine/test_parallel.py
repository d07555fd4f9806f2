"""Several ranks: results have the bits that one process gives, and what can't be divided is refused."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine.errors import UnsupportedModelError
from engine.linear.packed import PackedLinear, kernel_fault, pack, packed_rows
from engine.parallel.group import Ranks
from engine.parallel.linear import model_share
from engine.parallel.messages import Run, encode
from engine.rows import SequenceRows
from protocol.messages import EngineRequest
from tests.e2e.architectures import config_of, write_model
from tests.engine import parallel_child
from tests.worker.harness import request, tiny_config

ANSWER_S = 60.0
NO_KERNEL = kernel_fault(torch.device("cpu"), torch.bfloat16)
needs_kernel = pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model("llama", folder)
    return folder


def requests() -> list[EngineRequest]:
    """Long and short ones together, greedy and sampled; the last one again beforehand, alone."""
    prompts = [[3 + (7 * i + j * j) % 300 for j in range(5 + 40 * i)] for i in range(4)]
    sampling: dict[str, Any] = {"logprobs": 5}
    batch = [
        request(str(i), prompt, 16, temperature=i % 2, seed=i, **sampling) for i, prompt in enumerate(prompts)
    ]
    alone = msgspec.structs.replace(batch[-1], request_id="alone", cache_salt="alone")
    return [alone, *batch]


def start(folder: Path, size: int, **options: Any) -> Any:
    """Begin a run; the pipe's end that gets its answer."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    encoded = [msgspec.msgpack.encode(each) for each in requests()]
    config = msgspec.to_builtins(tiny_config(folder, **options))
    process = context.Process(target=parallel_child.run, args=(config, size, encoded, theirs), daemon=True)
    process.start()
    theirs.close()
    return ours


def answer(pipe: Any) -> Any:
    assert pipe.poll(ANSWER_S)
    return pipe.recv()


@pytest.mark.parametrize(
    ("dtype", "compile"),
    [
        ("float32", "off"),
        pytest.param("bfloat16", "off", marks=needs_kernel),
        pytest.param("bfloat16", "auto", marks=needs_kernel),
    ],
)
def test_ranks_give_the_tokens_of_one_process(folder: Path, dtype: str, compile: str) -> None:
    pipes = [start(folder, size, dtype=dtype, compile=compile) for size in (1, 2)]
    (one, expected), (two, results) = map(answer, pipes)
    assert two == f"{one}, on 2 ranks"
    tokens, expected_tokens = [{k: r[::2] for k, r in each.items()} for each in (results, expected)]
    assert tokens == expected_tokens
    assert len({token for ids in tokens["0"] for token in ids}) > 4, "a test that cannot fail"
    if dtype == "bfloat16":  # torch's products in float32 have other bits for a part of the outputs
        assert results == expected, "the log-probabilities have the same bits"
        assert results["alone"] == results["3"], "with any batch"


def test_a_model_that_no_rank_can_serve_is_refused(tmp_path: Path) -> None:
    write_model("gpt2", tmp_path)
    assert "gpt2: it has no tensor-parallel plan" in answer(start(tmp_path, 2))


@pytest.mark.parametrize(
    ("model_type", "size", "reason"),
    [
        ("olmo2", 2, "o_proj: the tensor-parallel plan's 'rowwise_split_input' is not supported"),
        ("mixtral", 2, "experts: the tensor-parallel plan's 'moe_tp_experts' is not supported"),
        ("llama", 5, "q_proj: its 64 outputs cannot be divided among 5 tensor-parallel ranks"),
    ],
)
def test_what_cannot_be_divided_is_named(model_type: str, size: int, reason: str) -> None:
    model = AutoModelForCausalLM.from_config(config_of(model_type))
    with pytest.raises(UnsupportedModelError, match=f"{model_type}: model.layers.0.*{reason}"):
        model_share(model, Ranks(1, size))


def test_a_share_has_its_own_outputs_and_no_copies() -> None:
    model = AutoModelForCausalLM.from_config(config_of("llama"))
    share: Any = model_share(model, Ranks(1, 2))
    whole = model.model.layers[1].mlp.down_proj.weight
    part = share.model.layers[1].mlp.down_proj.part.weight
    assert torch.equal(part, whole[32:])
    assert part.data_ptr() == whole[32:].data_ptr()
    assert type(model.model.layers[1].mlp.down_proj) is nn.Linear, "the whole model is as it was"


def test_rows_of_packed_weights() -> None:
    weight = torch.randn(192, 32, dtype=torch.bfloat16)
    packed = pack(weight)
    some = packed_rows(packed, [range(5, 70), range(100, 101)])
    assert torch.equal(some, pack(weight[[*range(5, 70), 100]]))
    panels = packed_rows(packed, [range(64, 192)])
    assert torch.equal(panels, pack(weight[64:]))
    assert panels.data_ptr() == packed[1:].data_ptr(), "whole panels are not copied"


@needs_kernel
def test_a_packed_layer_with_some_of_its_outputs() -> None:
    linear = nn.Linear(32, 96, dtype=torch.bfloat16)
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    whole = PackedLinear(linear)
    assert torch.equal(whole.rows(range(48, 96))(x), whole(x)[:, 48:])


def test_a_step_travels_as_it_is() -> None:
    tree = SequenceRows([1, 2, 3], 7, [[4, 5]], [1, 3, 1 << 63], 6, 2)
    sent = Run([tree], [0, 2], False)
    got = msgspec.msgpack.decode(encode(sent), type=Run)
    rows = got.batch[0]
    assert (got.logit_rows, got.wants_hidden) == ([0, 2], False)
    assert dataclasses.astuple(rows) == dataclasses.astuple(tree)
