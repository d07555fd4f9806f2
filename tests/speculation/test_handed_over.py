"""A prompt that is to be handed over gets one token here, whatever could be drafted for it."""

from __future__ import annotations

from pathlib import Path

from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from speculation.speculator import speculate
from tests.worker.tiny_model import greedy, load, write_tiny_llama

BUDGET = 64
NUM_EMITTED = 5


def test_the_last_chunk_of_a_request_placed_anew_drafts_nothing(tmp_path: Path) -> None:
    """Of its prompt and emitted tokens exactly one is left for the second step, as in decoding."""
    write_tiny_llama(tmp_path)
    prompt = list(range(1, BUDGET + 2 - NUM_EMITTED))
    expected = greedy(load(tmp_path), prompt, 24)
    config = ServeConfig(
        model=str(tmp_path),
        dtype="float32",
        device="cpu",
        compile="off",
        max_num_batched_tokens=BUDGET,
        kv_cache_memory_bytes=8 << 20,
        speculative_config=SpeculativeConfig(
            method="draft_model", model=str(tmp_path), num_speculative_tokens=4
        ),
    )
    engine = Engine(config, speculate=speculate)
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=prompt,
        output_token_ids=expected[:NUM_EMITTED],
        sampling=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    )
    engine.add(request, prefill_only=True)
    assert not engine.step().outputs
    [first] = engine.step().outputs
    assert (first.token_ids, first.drafted_tokens) == (expected[NUM_EMITTED : NUM_EMITTED + 1], 0)
    assert not engine.step().outputs

    engine.resume("a")
    tokens, drafted = list(first.token_ids), 0
    while engine.has_work():
        for output in engine.step().outputs:
            tokens += output.token_ids
            drafted += output.drafted_tokens
    assert tokens == expected[NUM_EMITTED:]
    assert drafted > 0
    assert engine.stats().free_blocks + engine.stats().cached_blocks == engine.stats().total_blocks
