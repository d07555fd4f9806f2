"""A prompt that is to be handed over gets one token here, without drafts."""

from __future__ import annotations

from pathlib import Path

from engine.engine import Engine
from protocol.speculation import SpeculativeConfig
from speculation.speculator import BatchSpeculator
from tests.speculation.small_engine import CHUNK, ask, run, small_config
from tests.worker.tiny_model import greedy, load

NUM_EMITTED = 5


def test_the_last_chunk_of_a_request_placed_again_drafts_nothing(target: Path) -> None:
    """One token of its prompt and emitted tokens is left for the second step, which resembles decoding."""
    prompt = list(range(1, CHUNK + 2 - NUM_EMITTED))
    expected = greedy(load(target), prompt, 24)
    asked = SpeculativeConfig(method="draft_model", model=str(target), num_speculative_tokens=4)
    engine = Engine(small_config(target, speculative_config=asked), speculate=BatchSpeculator)
    request = ask("a", prompt, ignore_eos=True)
    request.output_token_ids.extend(expected[:NUM_EMITTED])
    engine.add(request, prefill_only=True)
    assert not engine.step().outputs
    [first] = engine.step().outputs
    assert (first.token_ids, first.drafted_tokens) == (expected[NUM_EMITTED : NUM_EMITTED + 1], 0)
    assert not engine.step().outputs

    engine.resume("a")
    rest = run(engine)["a"]
    assert first.token_ids + rest.token_ids == expected[NUM_EMITTED:]
    assert rest.drafted_tokens > 0
