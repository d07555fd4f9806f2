"""Steps that go ahead in models with recurrent layers, on a device that is late."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.ids import BlockIdentity
from protocol.outputs import TokenOutput
from tests.e2e.architectures import VOCAB_SIZE, write_model
from tests.engine.late_device import LateDevice, put_on_late_device
from tests.engine.test_recurrent import assert_empty, needs_hooks
from tests.engine.test_steps_ahead import (
    Script,
    facts,
    num_launched_ahead,
    play,
    prompt_of,
    request,
    tokens,
)
from worker.setup import build_engine

pytestmark = needs_hooks

MODELS = ["qwen3_5_text", "nemotron_h", "kimi_linear", "jamba", "lfm2"]
"""With gated delta nets, Mamba2, Kimi delta attention, Mamba, and convolutions alone."""

SEATS = 6

Pair = tuple[Engine, LateDevice]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(model_type: str) -> Path:
        folder = tmp_path_factory.mktemp(model_type)
        write_model(model_type, folder)
        return folder

    return made


def engine_of(folder: Path, ahead: bool, num_blocks: int, **options: Any) -> Pair:
    """With room for so many blocks behind the state slots and a state."""
    config: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "compile": "off",
        "max_model_len": 144,
        "max_num_batched_tokens": 48,
        "max_num_seqs": SEATS,
        "itl_budget": 0.0,  # chunks as long on a slow host
        "kv_cache_memory_bytes": 2**23,
    }
    pool = build_engine(ServeConfig(**config | options))[0].pool
    assert pool.state_slots is not None
    blocks = num_blocks + pool.state_blocks
    room = SEATS * pool.state_slots.layout.state_slot_bytes + blocks * pool.block_pools[0].shape[1]
    engine, _ = build_engine(ServeConfig(**config | options | {"kv_cache_memory_bytes": room}))
    return engine, put_on_late_device(engine, ahead=ahead)


def script_of(seed: int, longest_answer: int) -> Script:
    """Conversations: they share beginnings, arrive one after the other, and are stopped by tokens or aborts,
    at grid points and between them.
    """
    rng, script = random.Random(seed), Script()
    shared = prompt_of(40, seed=99)
    for number in range(9):
        prompt = shared[: rng.choice([0, 16, 40])] + prompt_of(
            rng.randint(1, 90 - longest_answer), seed=number
        )
        sampling: dict[str, Any] = {"seed": number}
        if number % 2:
            sampling |= {"temperature": 1.0, "top_p": 0.9}
        if number % 3 == 1:  # one token of sixteen ends it
            sampling["stop_token_ids"] = rng.sample(range(VOCAB_SIZE), VOCAB_SIZE // 16)
        asked = request(str(number), prompt, rng.randint(longest_answer - 20, longest_answer), **sampling)
        script.arrivals.setdefault(rng.randint(0, 12), []).append(asked)
    script.aborts = {"3": 10, "6": 17}
    return script


def again(script: Script, answers: dict[str, list[TokenOutput]]) -> Script:
    """Each conversation's next turn."""
    turns = Script()
    for step, arrivals in script.arrivals.items():
        for asked in arrivals:
            text = [*asked.prompt_token_ids, *tokens(answers[asked.request_id]), 5, 6, 7]
            turns.arrivals.setdefault(step, []).append(request(f"{asked.request_id} again", text, 8))
    return turns


def kept_states(engine: Engine) -> dict[BlockIdentity, Tensor]:
    """The bytes of each."""
    block_pool, memory = engine.blocks.block_pools[0], engine.pool.block_pools[0]
    assert engine.pool.state_slots is not None
    count = engine.pool.state_slots.layout.state_bytes
    return {
        identity: memory[kept.blocks].flatten()[:count].view(torch.float32)
        for identity, kept in block_pool._states.items()
    }


CASES = [*((model_type, 400) for model_type in MODELS), ("qwen3_5_text", 10), ("nemotron_h", 10)]


@pytest.mark.parametrize(("model_type", "num_blocks"), CASES)
def test_tokens_and_states_are_those_of_one_step_after_another(
    folder_of: Callable[[str], Path], model_type: str, num_blocks: int
) -> None:
    """A conversation's second turn goes on from the state that its first one left."""
    folder = folder_of(model_type)
    script = script_of(CASES.index((model_type, num_blocks)), 40 if num_blocks > 100 else 80)
    (engine, device), (ahead, late) = (engine_of(folder, each, num_blocks) for each in (False, True))
    first_turns: dict[BlockIdentity, Tensor] = {}
    for _ in range(2):
        answers = play(engine, script)
        expected = {name: facts(outputs) for name, outputs in answers.items()}
        assert {name: facts(outputs) for name, outputs in play(ahead, script).items()} == expected
        for each, its in ((engine, device), (ahead, late)):
            its.finish()
            assert_empty(each)
        script, first_turns = again(script, answers), first_turns or kept_states(ahead)
    assert num_launched_ahead(device) == 0
    assert num_launched_ahead(late) > 0.4 * late.num_steps
    assert (ahead.stats().num_preemptions > 0) == (num_blocks < 100)
    theirs, ours = kept_states(engine), kept_states(ahead)
    shared = theirs.keys() & ours.keys()
    if num_blocks > 100:
        assert len(shared) > 0.9 * max(len(theirs), len(ours)) > 10
        assert all(torch.equal(ours[identity], state) for identity, state in first_turns.items())
    for each in (engine, ahead):
        assert each.stats().prefix_hit_tokens > 0
    for identity in shared:
        torch.testing.assert_close(ours[identity], theirs[identity], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", MODELS)
def test_alone_a_sequence_has_the_same_bits(folder_of: Callable[[str], Path], model_type: str) -> None:
    """In each step there are as many rows as without. It is stopped before, at and behind grid points."""
    folder = folder_of(model_type)
    (engine, device), (ahead, late) = (engine_of(folder, each, 400) for each in (False, True))
    for length in (18, 19, 20, 35):
        script = Script({0: [request("a", prompt_of(30, 5), 60)]}, {"a": length})
        found = []
        for each in (engine, ahead):
            found.append(facts(play(each, script)["a"]))
        assert found[0] == found[1]
    device.finish()
    late.finish()
    theirs, ours = kept_states(engine), kept_states(ahead)
    assert theirs.keys() == ours.keys() and len(ours) == 4
    assert all(torch.equal(theirs[identity], ours[identity]) for identity in theirs)
