"""Steps launched before the previous tokens are known, on a device that computes late."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.engine import Engine
from engine.step.scheduler import ScheduledStep
from protocol.config import ServeConfig
from protocol.ids import BlockIdentity
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from tests.e2e.architectures import write_model
from tests.engine.late_device import LateDevice, put_on_late_device
from tests.engine.test_engine import prompt_of, tokens
from tests.worker.tiny_model import VOCAB_SIZE
from worker.setup import build_engine

HYBRIDS = ["qwen3_5_text", "nemotron_h", "kimi_linear", "jamba", "lfm2"]
"""Gated delta nets, Mamba2, Kimi delta attention, Mamba, and convolutions only."""

MakeEngine = Callable[..., tuple[Engine, LateDevice]]


@pytest.fixture(scope="module")
def folder_of(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(model_type: str) -> Path:
        if model_type == "llama":
            return folder
        hybrid = tmp_path_factory.mktemp(model_type)
        write_model(model_type, hybrid)
        return hybrid

    return made


CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "compile": "off",
    "max_model_len": 144,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 4,
    "itl_budget": 0.0,  # equal chunks on a slow host
}


@cache
def sizes_of(folder: Path) -> tuple[int, int, int]:
    """Return a model's bytes of a block, blocks of a kept state, and bytes of a state slot."""
    pool = build_engine(ServeConfig(model=str(folder), kv_cache_memory_bytes=2**23, **CONFIG))[0].pool
    slot = 0 if pool.state_slots is None else pool.state_slots.layout.state_slot_bytes
    return pool.memory.shape[1], pool.state_blocks, slot


@pytest.fixture
def make_engine(folder_of: Callable[[str], Path]) -> MakeEngine:
    def make(
        ahead: bool = True, num_blocks: int = 64, model_type: str = "llama", **options: Any
    ) -> tuple[Engine, LateDevice]:
        """Make an engine with room for these blocks, all state slots and one kept state."""
        folder, config = folder_of(model_type), CONFIG | options
        block_bytes, state_blocks, slot_bytes = sizes_of(folder)
        room = (num_blocks + state_blocks) * block_bytes + config["max_num_seqs"] * slot_bytes
        engine, _ = build_engine(ServeConfig(model=str(folder), kv_cache_memory_bytes=room, **config))
        return engine, put_on_late_device(engine, ahead=ahead)

    return make


def request(name: str, prompt: list[int], max_tokens: int, **sampling: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True} | sampling)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=params)


@dataclass
class Script:
    """Scripted `arrivals` by step, and `aborts` at a number of tokens, as at a stop string."""

    arrivals: dict[int, list[EngineRequest]] = field(default_factory=dict)
    aborts: dict[str, int] = field(default_factory=dict)


def random_script(seed: int, longest_answer: int) -> Script:
    rng, script = random.Random(seed), Script()
    shared = prompt_of(40, seed=99)
    for number in range(14):
        name = str(number)
        prompt = shared[: rng.choice([0, 16, 40])] + prompt_of(
            rng.randint(1, 85 - longest_answer), seed=number
        )
        sampling: dict[str, Any] = {"seed": number}
        if rng.random() < 0.5:
            sampling |= {"temperature": 1.0, "top_p": 0.9}
        if rng.random() < 0.5:  # a tenth of all tokens end it
            sampling["stop_token_ids"] = rng.sample(range(VOCAB_SIZE), VOCAB_SIZE // 10)
        if rng.random() < 0.15:
            sampling["repetition_penalty"] = 1.3
        if rng.random() < 0.15:
            sampling["logprobs"] = 2
        if rng.random() < 0.15:
            sampling["prompt_logprobs"] = 0
        asked = request(name, prompt, rng.randint(5, longest_answer), **sampling)
        script.arrivals.setdefault(rng.randint(0, 60), []).append(asked)
        if rng.random() < 0.2:
            script.aborts[name] = rng.randint(1, 10)
    return script


def play(engine: Engine, script: Script) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {}
    for step in range(1000):
        for asked in script.arrivals.get(step, []):
            engine.add(asked)
            outputs[asked.request_id] = []
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
            if len(tokens(outputs[output.request_id])) == script.aborts.get(output.request_id):
                engine.abort(output.request_id)
        if step > max(script.arrivals) and not engine.has_work():
            return outputs
    raise AssertionError("it does not end")


def facts(outputs: list[TokenOutput]) -> Any:
    ends = [(output.finish_reason, output.stop_token_id) for output in outputs]
    scored = [each.rank for output in outputs for each in output.logprobs or []]
    return tokens(outputs), [output.position for output in outputs], ends, scored


def assert_empty(engine: Engine) -> None:
    assert engine.blocks.available == engine.blocks.num_blocks
    assert not engine.sequences and not engine.has_work()
    if engine.pool.state_slots is not None:
        assert sorted(engine.pool.state_slots._free) == list(range(engine.config.max_num_seqs))


def second_turns(script: Script, answers: dict[str, list[TokenOutput]]) -> Script:
    """Return each conversation's next turn after its first answer."""
    turns = Script()
    for step, arrivals in script.arrivals.items():
        for asked in arrivals:
            text = [*asked.prompt_token_ids, *tokens(answers[asked.request_id]), 5, 6, 7]
            turns.arrivals.setdefault(step, []).append(request(f"{asked.request_id} again", text, 8))
    return turns


def kept_states(engine: Engine) -> dict[BlockIdentity, Tensor]:
    """Return the bytes of each kept state, if the model has any."""
    if engine.pool.state_slots is None or engine.blocks.states is None:
        return {}
    memory = engine.pool.memory
    count = engine.pool.state_slots.layout.state_bytes
    return {
        identity: memory[kept.blocks].flatten()[:count].view(torch.float32)
        for identity, kept in engine.blocks.states.entries.items()
    }


ROOMY, TIGHT = 400, 10
CASES = [("llama", seed, num_blocks) for seed, num_blocks in enumerate((ROOMY, TIGHT))]
CASES += [(model_type, seed, ROOMY) for seed, model_type in enumerate(HYBRIDS)]
CASES += [(model_type, seed, TIGHT) for seed, model_type in enumerate(HYBRIDS[:2])]


@pytest.mark.parametrize(("model_type", "seed", "num_blocks"), CASES)
def test_tokens_and_states_equal_those_of_steps_one_after_another(
    make_engine: MakeEngine, model_type: str, seed: int, num_blocks: int
) -> None:
    script = random_script(seed, 28 if num_blocks == ROOMY else 80)
    (engine, device), (ahead, late) = (make_engine(each, num_blocks, model_type) for each in (False, True))
    check_published = watch_published(ahead) if model_type == "llama" else lambda: None
    first_states: dict[BlockIdentity, Tensor] = {}
    for _ in range(2):
        answers = play(engine, script)
        expected = {name: facts(outputs) for name, outputs in answers.items()}
        assert {name: facts(outputs) for name, outputs in play(ahead, script).items()} == expected
        check_published()
        for each, its in ((engine, device), (ahead, late)):
            its.finish()
            assert_empty(each)
            assert each.stats().prefix_hit_tokens > 0
        script, first_states = second_turns(script, answers), first_states or kept_states(ahead)
    assert num_launched_ahead(device) == 0
    assert num_launched_ahead(late) > 0.2 * late.num_steps
    assert (ahead.stats().num_preemptions > 0) == (num_blocks == TIGHT)
    theirs, ours = kept_states(engine), kept_states(ahead)
    shared = theirs.keys() & ours.keys()
    if num_blocks == ROOMY and model_type != "llama":
        assert len(shared) > 0.9 * max(len(theirs), len(ours)) > 10
        assert all(torch.equal(ours[identity], state) for identity, state in first_states.items())
    for identity in shared:
        torch.testing.assert_close(ours[identity], theirs[identity], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_a_lone_sequence_has_the_same_bits(make_engine: MakeEngine, model_type: str) -> None:
    """Each step has the same rows as without steps ahead. It stops before, at and after grid points."""
    (engine, device), (ahead, late) = (make_engine(each, ROOMY, model_type) for each in (False, True))
    for length in (18, 19, 20, 35):
        script = Script({0: [request("a", prompt_of(30, 5), 60)]}, {"a": length})
        found = [facts(play(each, script)["a"]) for each in (engine, ahead)]
        assert found[0] == found[1]
    device.finish()
    late.finish()
    theirs, ours = kept_states(engine), kept_states(ahead)
    assert theirs.keys() == ours.keys() and len(ours) == 4
    assert all(torch.equal(theirs[identity], ours[identity]) for identity in theirs)


def watch_published(engine: Engine) -> Callable[[], None]:
    """Check that only tokens of prompts and answers are published, with their own KV."""
    log, known = engine.blocks.watch(), []
    texts: dict[BlockIdentity, list[list[int]]] = {b"": [[]]}
    forget = engine.sequences.forget

    def remember(sequence: Any) -> None:
        known.append([*sequence.token_ids])
        forget(sequence)

    engine.sequences.forget = remember

    def check() -> None:
        stored = [event for event in log.take() if event.kind == "stored"]
        assert stored
        for event in stored:
            before = texts.get(event.parent, [[]])
            texts[event.identity] = [[*text, *event.token_ids] for text in before]
            for text in texts[event.identity]:
                assert any(each[: len(text)] == text for each in known)

    return check


def num_launched_ahead(device: LateDevice) -> int:
    """Return how many steps were launched before anyone waited for the one before."""
    at = {entry: place for place, entry in enumerate(device.log)}
    waited = (step for kind, step in device.log if kind == "wait")
    return sum(at["launch", step + 1] < at["wait", step] for step in waited if ("launch", step + 1) in at)


def test_the_next_step_is_prepared_and_launched_while_one_runs(make_engine: MakeEngine) -> None:
    engine, device = make_engine()
    lay_out = engine.scheduler.following

    def following(step: Any) -> Any:
        device.log.append(("lay out", device.num_steps))
        return lay_out(step)

    engine.scheduler.following = following
    for number in range(3):
        engine.add(request(str(number), prompt_of(10, number), 20))
    engine.step()
    for step in range(1, 15):
        del device.log[:]
        assert len(engine.step().outputs) == 3
        assert device.log == [("lay out", step + 1), ("launch", step + 1), ("wait", step)]


def test_requests_that_wait_for_rows_or_room_do_not_delay_it(make_engine: MakeEngine) -> None:
    for options in ({"max_num_seqs": 2}, {"num_blocks": 9, "max_model_len": 128}):
        engine, device = make_engine(**options)
        for number in range(6):
            engine.add(request(str(number), prompt_of(33, number), 30))
        while engine.has_work():
            engine.step()
        assert num_launched_ahead(device) > 0.8 * device.num_steps, options


def test_a_new_request_joins_the_next_step_but_one(make_engine: MakeEngine) -> None:
    engine, _ = make_engine()
    engine.add(request("a", prompt_of(10), 40))
    for _ in range(5):
        engine.step()
    engine.add(request("b", prompt_of(30, 1), 5))
    assert [output.request_id for output in engine.step().outputs] == ["a"]
    assert [output.request_id for output in engine.step().outputs] == ["a", "b"]


def test_no_step_is_launched_after_one_that_left_a_prompt_out(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(ahead=False)
    engine.add(request("a", prompt_of(10), 40))
    engine.step()
    engine.add(request("b", prompt_of(80, 1), 5))
    engine.step()
    lone = ScheduledStep([engine.sequences["a"]], [1])
    assert engine.scheduler.following(lone) is None
    engine.abort("b")
    assert engine.scheduler.following(lone) is not None


def test_nothing_is_launched_for_requests_that_end_by_max_tokens(make_engine: MakeEngine) -> None:
    engine, device = make_engine()
    engine.add(request("a", prompt_of(10), 5))
    while engine.has_work():
        engine.step()
    assert device.num_steps == 5
    assert not device.is_busy


def test_a_late_end_costs_one_row(make_engine: MakeEngine) -> None:
    engine, _ = make_engine(ahead=False)
    engine.add(request("a", prompt_of(10), 12))
    answer = run(engine)
    stop = next(token for token in answer[3:] if answer.index(token) >= 3)
    length = answer.index(stop) + 1
    ahead, device = make_engine()
    ahead.add(request("a", prompt_of(10), 12, stop_token_ids=[stop]))
    assert run(ahead) == answer[:length]
    assert device.num_steps == length + 1
    assert_empty(ahead)


def run(engine: Engine) -> list[int]:
    found: list[int] = []
    while engine.has_work():
        found += tokens(engine.step().outputs)
    return found


@pytest.mark.parametrize("ends", ["by a stop token", "by an abort", "by its time limit"])
def test_a_late_rows_write_harms_nobody(make_engine: MakeEngine, ends: str) -> None:
    """Blocks that another worker fills meanwhile are different ones."""
    engine, device = make_engine(num_blocks=9, max_model_len=128)
    engine.add(request("a", prompt_of(20), 60))
    engine.step()
    engine.step()
    sequence = engine.sequences["a"]
    if ends == "by a stop token":
        sequence.params.stop_token_ids.extend(range(VOCAB_SIZE))
        assert engine.step().outputs[0].finish_reason == "stop"
    elif ends == "by an abort":
        engine.abort("a")
    else:
        sequence.deadline = 0.0
        (output,) = engine.schedule().expired
        assert output.error_kind == "timeout"
    assert engine.has_work()
    assert engine.reserve(request("b", prompt_of(120, seed=1), 2)) is None
    reservation = engine.reserve(request("b", prompt_of(100, seed=1), 2))
    assert reservation is not None
    (taken,) = reservation.sequence_blocks.blocks
    filled = fill(engine, taken)
    engine.run(engine.schedule())
    assert not device.is_busy and not engine.has_work()
    assert torch.equal(engine.pool.memory[taken], filled)
    reservation.sequence_blocks.free()
    assert_empty(engine)


def fill(engine: Engine, blocks: list[int]) -> Tensor:
    engine.pool.memory[blocks] = 7
    return engine.pool.memory[blocks].clone()


def test_a_row_without_a_finite_score_fails_alone(make_engine: MakeEngine) -> None:
    """Whatever token the following row takes."""
    engine, device = make_engine()
    for name in "ab":
        engine.add(request(name, prompt_of(10, ord(name)), 6))
    engine.step()
    (place,) = [blocks[0] for blocks in engine.sequences["a"].held.blocks]
    device.put(lambda: engine.pool.memory[place].view(torch.float32).fill_(torch.nan))
    found: dict[str, list[TokenOutput]] = {"a": [], "b": []}
    while engine.has_work():
        for output in engine.step().outputs:
            found[output.request_id].append(output)
    assert found["a"][-1].error_kind == "internal"
    assert len(tokens(found["b"])) == 5
    assert_empty(engine)
