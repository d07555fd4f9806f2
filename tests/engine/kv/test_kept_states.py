"""Engines of models with recurrent layers keep states together with the prefixes that they follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine.engine import Engine
from kvtransfer.blocks.layout import conversion_problem
from protocol.errors import ConfigError
from protocol.outputs import TokenOutput
from tests.e2e.architectures import write_model
from tests.engine.devices.test_recurrent import assert_empty, room_of
from tests.engine.test_engine import Make, ask, prompt_of, run, tiny_engine, tokens
from tests.worker.tiny_model import assert_greedy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write_model("qwen3_5_text", folder)
    return folder


def engine_of(folder: Path, **options: Any) -> Engine:
    bounds = {"max_model_len": 256, "max_num_seqs": 6, "kv_cache_memory_bytes": 2**22}
    return tiny_engine(folder, **bounds | options)


@pytest.fixture
def make_engine(folder: Path) -> Make:
    return lambda **options: engine_of(folder, **options)


class Asker:
    """Asks one prompt after the other, and compares the answers with `generate`."""

    def __init__(self, engine: Engine, reference: PreTrainedModel) -> None:
        self.engine, self._reference, self._count = engine, reference, 0

    def __call__(self, *prompts: list[int], max_tokens: int = 9) -> int:
        """Ask these prompts together. Return how many of their tokens were cached."""
        before = self.engine.stats().prefix_hit_tokens
        for index, prompt in enumerate(prompts):
            self.engine.add(ask(f"{self._count}-{index}", prompt, max_tokens))
        outputs = run(self.engine)
        self.answers = [tokens(outputs[f"{self._count}-{index}"]) for index in range(len(prompts))]
        for prompt, answer in zip(prompts, self.answers, strict=True):
            assert_greedy(self._reference, prompt, answer, max_tokens)
        self._count += 1
        assert_empty(self.engine)
        return self.engine.stats().prefix_hit_tokens - before


@pytest.mark.parametrize(("block_size", "budget"), [(8, 256), (16, 23), (16, 256), (32, 23)])
def test_prompts_continue_from_their_last_shared_state(
    make_engine: Make, reference: PreTrainedModel, block_size: int, budget: int
) -> None:
    asked = Asker(make_engine(block_size=block_size, max_num_batched_tokens=budget), reference)
    unit = max(block_size, 16)

    def point(num_tokens: int) -> int:
        return num_tokens // unit * unit

    first = prompt_of(70)
    assert asked(first, max_tokens=30) == 0
    assert asked(first) == point(69)
    whole = prompt_of(64, 1)
    assert (asked(whole), asked(whole)) == (0, point(63)), "the last token is computed, for its logits"
    if unit == 16:
        turn = first + asked_again(asked, first, 30) + prompt_of(11, 2)
        assert asked(turn) == point(99), "an answer's last token has no KV"
    branches = [prompt_of(70, 3)[:50] + prompt_of(30, seed) for seed in (4, 5, 6)]
    assert [asked(branch) for branch in branches] == [0, 0, point(50)]


def asked_again(asked: Asker, prompt: list[int], max_tokens: int) -> list[int]:
    asked(prompt, max_tokens=max_tokens)
    return asked.answers[0]


def test_prompts_that_arrive_together_share_the_first_ones_states(
    make_engine: Make, reference: PreTrainedModel
) -> None:
    asked = Asker(make_engine(), reference)
    preamble = prompt_of(80)
    assert asked(*[preamble + prompt_of(20, seed) for seed in (1, 2, 3)]) == 2 * 80
    assert asked(*[prompt_of(83, 9)] * 3) == 2 * 80


def test_a_hit_fits_if_its_prompt_just_fitted(make_engine: Make) -> None:
    """The state that it continues from makes room for the one that it hands over."""
    roomy = make_engine(max_model_len=128)
    blocks = 128 // 16 + 1 + roomy.pool.state_blocks
    engine = make_engine(max_model_len=128, kv_cache_memory_bytes=room_of(roomy, blocks))
    assert engine.blocks.num_blocks == blocks
    prompt, found = prompt_of(127), []
    for name in ("first", "again"):
        engine.add(ask(name, prompt, 1), prefill_only=True)
        outputs = [output for _ in range(9) for output in engine.step().outputs]
        found += [output.cached_tokens for output in outputs]
        engine.abort(name)
        assert_empty(engine)
    assert found == [0, 112]


def test_evicted_blocks_return_with_their_state(
    make_engine: Make, reference: PreTrainedModel, tmp_path: Path
) -> None:
    """From the host memory, and after a restart from the disk."""
    roomy = make_engine(max_model_len=128)
    block_bytes = roomy.pool.memory.shape[1]
    options = {
        "max_model_len": 128,
        "kv_cache_memory_bytes": room_of(roomy, 128 // 16 + 1 + roomy.pool.state_blocks),
        "kv_offloading_size": 60 * block_bytes / 2**30,
        "kv_disk_path": str(tmp_path),
        "kv_disk_size": 400 * block_bytes / 2**30,
    }
    prompts = [prompt_of(length, length) for length in (97, 64, 110)]
    asked = Asker(make_engine(**options), reference)
    assert [asked(prompt) for prompt in prompts] == [0, 0, 0]
    assert [asked(prompt) for prompt in prompts] == [96, 48, 96]
    preamble = prompts[0][:40]
    assert [asked(preamble + prompt_of(20, seed)) for seed in (1, 2)] == [0, 32]
    asked.engine.close()
    again = Asker(make_engine(**options), reference)
    assert again.engine.tiers is not None and again.engine.tiers.num_blocks == 0
    assert [again(prompt) for prompt in prompts] == [96, 48, 96]
    again.engine.close()


def test_kept_states_are_counted(make_engine: Make, reference: PreTrainedModel) -> None:
    roomy = make_engine()
    engine = make_engine(kv_cache_memory_bytes=room_of(roomy, 18 + 2 * roomy.pool.state_blocks))
    asked, states = Asker(engine, reference), engine.blocks.states
    assert states is not None
    prompt = prompt_of(70)
    assert [asked(prompt), asked(prompt)] == [0, 64]
    for seed in range(1, 5):
        asked(prompt_of(90, seed))
    totals = {name: value for name, value in engine.counters().items() if name.startswith("kept_state")}
    evicted = totals["kept_states_evicted_total"]
    assert evicted > 0
    assert totals == {
        "kept_states": len(states.entries),
        "kept_state_bytes": len(states.entries) * engine.pool.state_blocks * engine.pool.memory.shape[1],
        "kept_state_hits_total": 1,
        "kept_states_saved_total": len(states.entries) + evicted,
        "kept_states_evicted_total": evicted,
    }


def test_a_prompt_whose_hand_off_failed_continues_here(make_engine: Make, reference: PreTrainedModel) -> None:
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
        assert_greedy(reference, prompt, tokens(outputs[name]), 12)
    assert_empty(engine)


@pytest.mark.parametrize("compile", ["auto", "off"])
def test_bfloat16_gives_the_same_bits_in_any_chunks_and_batch(make_engine: Make, compile: str) -> None:
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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compile": "on"}, "--compile: on: not supported for a model with recurrent layers"),
        ({"kv_wire_dtype": "int8"}, "--kv-wire-dtype: not supported"),
        ({"block_size": 24}, "--block-size: 24: .* every 16 tokens"),
        ({"max_num_seqs": 4000}, r"--max-num-seqs: 4000 sequences' states.*; \d+ fit"),
    ],
)
def test_unsupported_options_are_named(make_engine: Make, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_engine(**options)


def test_states_only_move_to_equal_pools(make_engine: Make) -> None:
    ours = make_engine().handoff.segments
    assert conversion_problem(ours, ours) is None
    for other in (make_engine(block_size=32), make_engine(dtype="bfloat16")):
        problem = conversion_problem(other.handoff.segments, ours)
        assert problem is not None and "blocks beside a state are not converted" in problem[1]
