"""Recurrent layers: the operators' arithmetic and bits, and an engine that serves models with such layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from engine.engine import Engine
from engine.recurrent.layout import GRID, StateLayout
from engine.recurrent.native import CpuOperators
from engine.recurrent.operators import StepOperators, TorchOperators
from engine.recurrent.state_slots import RowSpan, StateSlots
from kvtransfer.blocks.layout import conversion_problem
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.outputs import TokenOutput
from tests.e2e.architectures import write_model
from tests.engine.recurrent_texts import LAYERS, Text, drafted, served, served_ahead, token_by_token
from tests.engine.test_engine import ask, prompt_of, run, tokens
from tests.worker.tiny_model import greedy, load

needs_hooks = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="this Transformers' recurrent layers call other functions",
)

MATES = 2


@pytest.mark.parametrize("kind", [TorchOperators, CpuOperators])
@pytest.mark.parametrize("rule", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_right_and_have_the_same_bits_in_any_chunks_and_company(
    kind: type[StepOperators], rule: str, dtype: torch.dtype
) -> None:
    texts = [Text(seed, rule, dtype) for seed in range(1 + MATES)]
    alone = served(kind, texts[:1], None)[0]
    for got, exact in zip(alone, token_by_token(texts[0]), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
    for seed in range(4):
        crowd = served(kind, texts, random.Random(seed))[0]
        assert all(torch.equal(one, other) for one, other in zip(alone, crowd, strict=True))


@pytest.mark.parametrize("kind", [TorchOperators, CpuOperators])
@pytest.mark.parametrize("rule", LAYERS)
@pytest.mark.parametrize("trees", [False, True])
def test_drafted_rows_have_the_bits_of_certain_ones_and_leave_nothing_behind(
    kind: type[StepOperators], rule: str, trees: bool
) -> None:
    """Drafts across two grid points, right for a while and then wrong; some of what is right is kept."""
    text = Text(0, rule, torch.bfloat16)
    whole = served(kind, [text], None)[0]
    assert sum(drafted(kind, text, whole, random.Random(seed), trees) for seed in range(6)) > 100


@pytest.mark.parametrize("kind", [TorchOperators, CpuOperators])
@pytest.mark.parametrize("rule", LAYERS)
def test_rows_that_go_ahead_have_the_bits_of_certain_ones(kind: type[StepOperators], rule: str) -> None:
    text = Text(0, rule, torch.bfloat16)
    whole = served(kind, [text], None)[0]
    for seed in range(4):
        assert all(map(torch.equal, served_ahead(kind, text, random.Random(seed)), whole))


def test_a_state_that_decays_to_almost_nothing_has_no_denormal_numbers() -> None:
    """Which take a CPU a hundred times as long."""
    text = Text(0, "sum", torch.float32)
    state_slots = StateSlots(StateLayout((text.layer,), torch.float32), 1, torch.device("cpu"))
    operators = CpuOperators(state_slots)
    operators.begin_step([RowSpan(0, 0, 2 * GRID, 2 * GRID)])
    _, query, key, value, decay = text.rows(0, 2 * GRID)
    value[GRID:] = 0
    operators.linear_attention(0, query, key, value, 100 * decay, None)
    states = state_slots.layers[0].state.abs()
    assert (states[states > 0] >= torch.finfo(torch.float32).tiny).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write_model("qwen3_5_text", folder)
    return folder


@pytest.fixture
def make_engine(folder: Path) -> Callable[..., Engine]:
    def make(**options: Any) -> Engine:
        config = ServeConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            compile="off",
            max_model_len=128,
            max_num_batched_tokens=64,
            max_num_seqs=6,
            kv_cache_memory_bytes=2**21,
        )
        return Engine(msgspec.structs.replace(config, **options))

    return make


def assert_empty(engine: Engine) -> None:
    assert sum(engine.blocks.available) == engine.blocks.num_blocks
    assert engine.pool.state_slots is not None
    assert sorted(engine.pool.state_slots._free) == list(range(engine.config.max_num_seqs))


@needs_hooks
def test_preempted_sequences_go_on_with_the_same_tokens(
    make_engine: Callable[..., Engine], folder: Path
) -> None:
    reference = load(folder)
    state_slots_and_nine_blocks = make_engine().pool
    assert state_slots_and_nine_blocks.state_slots is not None
    layout = state_slots_and_nine_blocks.state_slots.layout
    block_bytes = state_slots_and_nine_blocks.block_pools[0].shape[1]
    room = 6 * layout.state_slot_bytes + (9 + state_slots_and_nine_blocks.state_blocks) * block_bytes
    engine = make_engine(kv_cache_memory_bytes=room)
    prompts = [prompt_of(20 + 3 * seed, seed) for seed in range(6)]
    for index, prompt in enumerate(prompts):
        engine.add(ask(str(index), prompt, 30))
    outputs = run(engine)
    assert engine.stats().num_preemptions > 0
    assert [tokens(outputs[str(i)]) for i in range(6)] == [greedy(reference, each, 30) for each in prompts]
    assert_empty(engine)


@needs_hooks
def test_a_prompt_that_nobody_took_over_goes_on_here(
    make_engine: Callable[..., Engine], folder: Path
) -> None:
    reference = load(folder)
    engine = make_engine()
    prompts = {"short": prompt_of(9), "long": prompt_of(70, 1)}
    outputs: dict[str, list[TokenOutput]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.add(ask(name, prompt, 12), prefill_only=True)
    while engine.has_work():
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    for index in range(6):  # take the state slots that they have left
        engine.add(ask(f"other-{index}", prompt_of(40, 2 + index)), prefill_only=index == 0)
    run(engine)
    engine.abort("other-0")
    for name in prompts:
        engine.resume(name)
    for name, found in run(engine).items():
        outputs[name] += found
    for name, prompt in prompts.items():
        assert tokens(outputs[name]) == greedy(reference, prompt, 12)
    assert_empty(engine)


@needs_hooks
@pytest.mark.parametrize("compile", ["auto", "off"])
def test_bfloat16_gives_the_same_bits_in_any_chunks_and_company(
    make_engine: Callable[..., Engine], compile: str
) -> None:
    def served(budget: int, num_mates: int) -> list[TokenOutput]:
        engine = make_engine(dtype="bfloat16", max_num_batched_tokens=budget, compile=compile)
        engine.add(ask("a", prompt_of(75), 12, sampling={"logprobs": 3}))
        for mate in range(num_mates):
            engine.add(ask(f"mate-{mate}", prompt_of(11 * mate + 5, mate + 1), 20))
        return run(engine)["a"]

    def facts(outputs: list[TokenOutput]) -> list[Any]:
        return [(output.token_ids, output.logprobs) for output in outputs]

    alone = facts(served(128, 0))
    assert facts(served(7, 0)) == alone
    assert facts(served(33, 5)) == alone


@needs_hooks
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compile": "on"}, "--compile: on: not supported for a model with recurrent layers"),
        ({"kv_wire_dtype": "int8"}, "--kv-wire-dtype: not supported"),
        ({"block_size": 24}, "--block-size: 24: .* every 16 tokens"),
        ({"max_num_seqs": 4000}, r"--max-num-seqs: 4000 sequences' states.*; \d+ fit"),
    ],
)
def test_what_cannot_be_served_is_named(
    make_engine: Callable[..., Engine], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_engine(**options)


@needs_hooks
def test_a_state_goes_to_equal_pools_alone(make_engine: Callable[..., Engine]) -> None:
    ours = make_engine().segments
    assert conversion_problem(ours, ours) is None
    for other in (make_engine(block_size=32), make_engine(dtype="bfloat16")):
        problem = conversion_problem(other.segments, ours)
        assert problem is not None and "blocks beside a state are not converted" in problem[1]
