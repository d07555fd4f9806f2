"""Faults of other servers with the KV of drafted tokens. Numbers follow our reference list.

Number 19, hidden states that the drafter only guessed: tests/speculation/test_drafters.py. Number 21 for
the model itself, whose state cannot be rolled back: tests/engine/load/test_loader.py.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoConfig

from engine.batch.runner import Fill, Step
from engine.devices.torch.runner import TorchRunner
from engine.engine import Engine
from engine.step.profiling import ProfilingRun
from engine.step.sequence import SequenceStage
from protocol.errors import ConfigError
from protocol.requests import EngineRequest
from speculation.speculator import BatchSpeculator
from tests.speculation.small_engine import (
    CHUNK,
    MAX_LEN,
    ask,
    drafting,
    joined,
    prompt_of,
    run,
    small_config,
    tokens,
)

NUM_DRAFTED = 5
BLOCK_SIZE = 16


def engine_with(model: Path, draft: Path, num_blocks: int = 128, **options: Any) -> Engine:
    config = small_config(model, 2 * num_blocks, **options)  # the draft's segment is as large as the model's
    return drafting(config, method="draft_model", model=str(draft), num_speculative_tokens=NUM_DRAFTED)


@pytest.fixture
def checked_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that each row of every forward writes to a block of its own sequence."""
    run_rows = TorchRunner.run

    def checked(self: TorchRunner, step: Step, fill: Fill | None = None) -> Any:
        written: list[int] = []
        for rows in step.batch:
            end = rows.start + len(rows.token_ids)
            assert end <= len(rows.tables[0]) * BLOCK_SIZE
            written += rows.tables[0][rows.start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
        assert len(written) == len(set(written))
        return run_rows(self, step, fill)

    monkeypatch.setattr(TorchRunner, "run", checked)


@pytest.mark.parametrize(
    ("length", "emitted"), [(15, 0), (16, 2), (17, 0), (48, 2), (CHUNK, 0), (CHUNK + 1, 2)]
)
def test_bug_17_only_the_prompts_blocks_are_handed_over(
    pair: tuple[Path, Path], length: int, emitted: int
) -> None:
    """Room for drafts would shift them. The decode worker drafts for another request meanwhile."""
    model, _ = pair
    request = ask("a", prompt_of(length - emitted), ignore_eos=True)
    other = ask("b", prompt_of(20, 1), ignore_eos=True)
    expected = tokens(run(Engine(small_config(model)), [request, other]))
    request = msgspec.structs.replace(request, output_token_ids=expected["a"][:emitted])
    prefill, decode = engine_with(model, model), engine_with(model, model)
    reservation = decode.reserve(request)
    assert reservation is not None
    prefill.add(request, prefill_only=True)
    [first] = finish(prefill)
    assert len(first.token_ids) == 1
    decode.add(other)
    assert joined(finish(decode)).token_ids == expected["b"]
    source, target = prefill.computed("a")[0].blocks, reservation.sequence_blocks.blocks[0]
    assert len(source) == len(target) == -(-length // BLOCK_SIZE)
    decode.pool.memory[target] = prefill.pool.memory[source]
    decode.activate(reservation, first.token_ids[0], length, draft=prefill.draft_state("a"))
    rest = joined(finish(decode))
    assert first.token_ids + rest.token_ids == expected["a"][emitted:]
    assert rest.drafted_tokens == rest.accepted_tokens > 0


def finish(engine: Engine) -> list[Any]:
    outputs = []
    while engine.has_work():
        outputs += engine.step().outputs
    return outputs


@pytest.mark.usefixtures("checked_rows")
def test_bug_18_drafts_have_their_own_blocks(pair: tuple[Path, Path]) -> None:
    """Without free blocks the drafts are left out."""
    model, _ = pair
    asked = [ask(f"r{index}", prompt_of(12 + index, index), 40, ignore_eos=True) for index in range(6)]
    engine = engine_with(model, model, num_blocks=16, max_model_len=64)
    assert tokens(run(engine, asked)) == tokens(run(Engine(small_config(model)), asked))
    assert engine.stats().num_preemptions > 0


def test_bug_20_no_step_writes_to_blocks_of_a_conversation_that_waits(pair: tuple[Path, Path]) -> None:
    """This covers padding rows, made-up sequences, and drafts for other requests."""
    model, _ = pair
    engine = engine_with(model, model)
    begun = ask("begun", prompt_of(40), ignore_eos=True)
    text = begun.prompt_token_ids + run(engine, [begun])["begun"].token_ids
    cached = [block for block, entry in enumerate(engine.blocks._entry_of) if entry is not None]
    assert len(cached) == engine.blocks.num_cached == (len(text) - 1) // BLOCK_SIZE
    before = engine.pool.memory[cached].clone()
    assert isinstance(engine._runner, TorchRunner)
    engine._runner._run_padding()
    with closing(ProfilingRun(engine.blocks, engine._runner, MAX_LEN)) as profiling:
        sequences = profiling.sequences(3, 40, NUM_DRAFTED)
        assert sequences is not None
        profiling.forward(sequences)
    run(engine, [ask(f"r{seed}", prompt_of(10 * seed, seed), ignore_eos=True) for seed in range(1, 6)])
    assert engine.pool.memory[cached].equal(before)
    again = run(engine, [ask("again", text + prompt_of(9, 9), ignore_eos=True)])["again"]
    assert engine.stats().prefix_hit_tokens == len(cached) * BLOCK_SIZE
    assert again.drafted_tokens == again.accepted_tokens > 0


def test_bug_21_a_draft_whose_state_cannot_be_rolled_back_is_refused(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    shape |= {"head_dim": 16, "num_heads": 4, "n_groups": 1, "state_size": 16}
    AutoConfig.for_model("mamba2", **shape).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"--speculative-config: model: mamba2: .*recurrent state"):
        engine_with(pair[0], tmp_path, load_format="dummy")


@pytest.mark.usefixtures("checked_rows")
@pytest.mark.parametrize("right", [True, False])
def test_bug_22_no_length_runs_ahead_of_the_committed_tokens(pair: tuple[Path, Path], right: bool) -> None:
    """Requests of the greatest length, with accepted and with rejected drafts."""
    model, draft = pair
    longest = 96
    asked: list[EngineRequest] = []
    for index in range(6):
        prompt = prompt_of(30 + index, index)
        asked.append(ask(f"r{index}", prompt, longest - len(prompt), ignore_eos=True))
    expected = tokens(run(Engine(small_config(model)), asked))
    engine = engine_with(model, model if right else draft, max_model_len=longest)
    speculator = engine._speculator
    assert isinstance(speculator, BatchSpeculator)
    drafter = speculator._drafters["draft_model"]
    found: dict[str, list[int]] = {}
    for request in asked:
        engine.add(request)
    while engine.has_work():
        for output in engine.step().outputs:
            found.setdefault(output.request_id, []).extend(output.token_ids)
        for sequence in engine.sequences.values():
            if sequence.stage is SequenceStage.RUNNING:
                assert drafter.num_drafted(sequence.request_id) <= sequence.num_computed
                assert sequence.num_computed < len(sequence.token_ids) <= longest
                assert len(sequence.held.blocks[0]) * BLOCK_SIZE <= longest
    assert found == expected
