"""The engine in isolation: chunks, priorities, deadlines, reservations, log-probabilities, counters."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine import phases
from engine.engine import Engine
from protocol.config import ServeConfig
from protocol.costs import StepCosts
from protocol.errors import ConfigError, InvalidRequestError
from protocol.outputs import TokenOutput, paged_logprobs
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from tests.worker.tiny_model import VOCAB_SIZE, greedy, load, write_tiny_llama

Make = Callable[..., Engine]
"""Makes an engine with these options."""

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4
MAX_LEN = 256
FIFTY_TOKENS_IN_9_MS = StepCosts(step_s=1e-3, row_s=0.0, context_s=0.0, token_s=9e-3 / 50, attention_s=0.0)


def tiny_engine(folder: Path, **options: Any) -> Engine:
    """Make an engine of a small model in fp32, with steps of at most 64 tokens."""
    config = ServeConfig(
        model=str(folder), dtype="float32", device="cpu", compile="off", max_num_batched_tokens=64
    )
    return Engine(replace(config, **options))


@pytest.fixture
def make_engine(folder: Path) -> Make:
    def make(num_blocks: int = 64, **options: Any) -> Engine:
        room = {"max_model_len": MAX_LEN, "kv_cache_memory_bytes": num_blocks * BLOCK_BYTES}
        return tiny_engine(folder, **{"max_num_seqs": 8} | room | options)

    return make


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


def ask(request_id: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> EngineRequest:
    sampling = {"temperature": 0.0, "ignore_eos": True} | fields.pop("sampling", {})
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params, **fields)


def run(engine: Engine) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def assert_empty(engine: Engine) -> None:
    assert engine.blocks.available == engine.blocks.num_blocks
    assert engine.blocks.num_free + engine.blocks.num_cached == engine.blocks.num_blocks
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
    assert not engine.sequences


def test_a_long_prompt_runs_in_chunks(make_engine: Make, reference: PreTrainedModel) -> None:
    engine = make_engine()
    prompt = prompt_of(150)
    engine.add(ask("a", prompt))
    sizes = []
    while engine.has_work() and not (step := engine.step()).outputs:
        sizes.append(step.num_tokens)
    assert sizes == [64, 64]
    assert step.num_tokens == 150 - 128
    got = step.outputs + run(engine)["a"]
    assert tokens(got) == greedy(reference, prompt, 8)
    assert got[-1].finish_reason == "length"
    assert_empty(engine)


def test_equal_prompts_are_computed_once(make_engine: Make, reference: PreTrainedModel) -> None:
    engine = make_engine()
    prompt = prompt_of(150)
    for index in range(4):
        engine.add(ask(f"same-{index}", prompt))
    engine.add(ask("other", prompt_of(20, seed=2)))
    engine.add(ask("longer", [*prompt[:100], *prompt_of(60, seed=1)]))
    prefilled = 0
    outputs: dict[str, list[TokenOutput]] = {}
    while engine.has_work():
        step = engine.step()
        num_decoded = sum(output.request_id in outputs for output in step.outputs)
        prefilled += step.num_tokens - num_decoded
        for output in step.outputs:
            outputs.setdefault(output.request_id, []).append(output)
    # Of 150 tokens 144 are in full blocks; of the first 100, 96.
    assert prefilled == 150 + 3 * 6 + (160 - 96) + 20
    assert list(outputs)[:2] == ["same-0", "other"]  # a prompt that shares nothing waits for nobody
    assert all(tokens(outputs[f"same-{index}"]) == greedy(reference, prompt, 8) for index in range(4))
    assert_empty(engine)


def test_followers_survive_their_leader(make_engine: Make, reference: PreTrainedModel) -> None:
    engine = make_engine()
    prompt = prompt_of(150)
    for name in ("leader", "second", "third"):
        engine.add(ask(name, prompt))
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (1, 2)
    engine.abort("leader")
    outputs = run(engine)
    assert tokens(outputs["second"]) == tokens(outputs["third"]) == greedy(reference, prompt, 8)
    assert_empty(engine)


def test_prompts_that_share_nothing_do_not_wait(make_engine: Make) -> None:
    engine = make_engine(max_num_batched_tokens=512)
    prompt = prompt_of(40)
    engine.add(ask("plain", prompt))
    engine.add(ask("salted", prompt, cache_salt="another tenant"))
    engine.add(ask("scored", prompt, sampling={"prompt_logprobs": 0}))
    assert engine.step().num_tokens == 120
    run(engine)
    uncached = make_engine(max_num_batched_tokens=512, enable_prefix_caching=False)
    for name in ("a", "b"):
        uncached.add(ask(name, prompt))
    assert uncached.step().num_tokens == 80


def hand_over(
    source: Engine, target: Engine, request: EngineRequest, foreign_format: str = "", **how: Any
) -> tuple[list[int], int]:
    """Hand over a prompt that `source` computes to `target`. Return the first token, and how many tokens of
    the prompt `target` had.
    """
    source.add(request, prefill_only=True)
    first = tokens(run(source)[request.request_id])
    reservation = target.reserve(request, foreign_format)
    assert reservation is not None
    missing = slice(reservation.covered // 16, None)
    sent = source.computed(request.request_id)[0].blocks[missing]
    received = reservation.sequence_blocks.blocks[0][missing]
    target.pool.memory[received] = source.pool.memory[sent]
    target.activate(reservation, first[0], len(request.prompt_token_ids), **how)
    return first, reservation.covered


@pytest.mark.parametrize(("num_blocks", "preempts"), [(64, False), (20, True)])
def test_a_handed_over_request_waits_for_a_row(
    make_engine: Make, reference: PreTrainedModel, num_blocks: int, preempts: bool
) -> None:
    """It already has its blocks. If these run out, it gives up its own before running sequences do."""
    prefill, decode = make_engine(), make_engine(num_blocks, max_num_seqs=2, enable_prefix_caching=False)
    prompts = {name: prompt_of(62, seed) for seed, name in enumerate("abcde")}
    asked = {name: ask(name, prompt, max_tokens=20) for name, prompt in prompts.items()}
    answers = {name: hand_over(prefill, decode, each)[0] for name, each in asked.items()} | {"whole": []}
    decode.add(ask("whole", prompts["a"], max_tokens=20))
    order: list[str] = []
    while decode.has_work():
        outputs = decode.step().outputs
        assert decode.stats().num_running <= 2 and len(outputs) <= 2
        for output in outputs:
            answers[output.request_id] += output.token_ids
            order += [output.request_id] if output.request_id not in order else []
    assert answers == {name: greedy(reference, prompts.get(name, prompts["a"]), 20) for name in answers}
    assert order == [*prompts, "whole"]
    assert (decode.stats().num_preemptions > 0) == preempts
    assert_empty(decode)


def test_a_prompt_beside_decoding_keeps_within_the_budget(
    make_engine: Make, reference: PreTrainedModel
) -> None:
    engine = make_engine(max_num_batched_tokens=512, itl_budget=0.01)
    engine.times.latest = FIFTY_TOKENS_IN_9_MS
    engine.add(ask("alone", prompt_of(200)))
    assert engine.step().num_tokens == 200
    engine.add(ask("long", prompt_of(240, seed=1)))
    engine.add(ask("next", prompt_of(100, seed=2)))
    assert [engine.step().num_tokens for _ in range(4)] == [1 + 50] * 4
    outputs = run(engine)
    assert tokens(outputs["long"]) == greedy(reference, prompt_of(240, seed=1), 8)


def test_a_prompt_keeps_within_the_slo_of_decoding_requests(make_engine: Make) -> None:
    engine = make_engine(max_num_batched_tokens=512, itl_budget=0.01)
    engine.times.latest = FIFTY_TOKENS_IN_9_MS
    engine.add(ask("strict", prompt_of(20), max_tokens=3, slo_tpot_s=0.0055))
    engine.add(ask("lax", prompt_of(20, seed=1), slo_tpot_s=0.1))
    engine.step()
    engine.add(ask("long", prompt_of(240, seed=2), slo_tpot_s=0.001))
    assert [engine.step().num_tokens for _ in range(3)] == [2 + 18, 2 + 18, 1 + 50]
    run(engine)


def test_lower_priority_values_run_first(make_engine: Make) -> None:
    engine = make_engine(max_num_seqs=1)
    for name, priority in (("late", 5), ("early", -5), ("middle", 0)):
        engine.add(ask(name, prompt_of(5), priority=priority))
    assert list(run(engine)) == ["early", "middle", "late"]


def test_a_deadline_ends_a_request_with_an_error(make_engine: Make) -> None:
    engine = make_engine()
    engine.add(ask("late", prompt_of(20), timeout_s=0.0))
    engine.add(ask("fine", prompt_of(20)))
    outputs = run(engine)
    assert outputs["late"][0].error_kind == "timeout"
    assert outputs["late"][0].finish_reason == "error"
    assert len(tokens(outputs["fine"])) == 8
    assert_empty(engine)


CONTINUED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 4},
    "filters": {"temperature": 1.2, "seed": 5, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.9,
        "seed": 6,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.5,
    },
    "bias": {"temperature": 1.0, "seed": 7, "logit_bias": {5: 4.0, 6: -9.0}},
    "min_tokens": {"min_tokens": 8, "stop_token_ids": list(range(1, VOCAB_SIZE, 2))},
    "logprobs": {"temperature": 1.0, "seed": 8, "logprobs": 3},
}


@pytest.mark.parametrize("emitted", [1, 7])
@pytest.mark.parametrize("sampling", CONTINUED.values(), ids=CONTINUED)
def test_emitted_tokens_continue_where_they_ended(
    make_engine: Make, sampling: dict[str, Any], emitted: int
) -> None:
    prompt = prompt_of(27)
    engine = make_engine()
    engine.add(ask("whole", prompt, max_tokens=12, sampling=sampling))
    whole = run(engine)["whole"]
    emitted = min(emitted, len(whole) - 1)
    before = tokens(whole[:emitted])
    engine.add(ask("rest", prompt, max_tokens=12, sampling=sampling, output_token_ids=before))
    rest = run(engine)["rest"]
    assert tokens(rest) == tokens(whole[emitted:])
    assert [output.position for output in whole + rest] == [*range(len(whole)), *range(emitted, len(whole))]
    assert [output.finish_reason for output in rest] == [output.finish_reason for output in whole[emitted:]]
    assert rest[-1].stop_token_id == whole[-1].stop_token_id
    for got, want in zip(rest, whole[emitted:], strict=True):
        assert (got.logprobs is None) == (want.logprobs is None)
        if got.logprobs is not None and want.logprobs is not None:
            assert got.logprobs[0].top_token_ids == want.logprobs[0].top_token_ids
            assert got.logprobs[0].logprob == pytest.approx(want.logprobs[0].logprob, abs=1e-4)
    assert_empty(engine)


def test_a_ban_that_begins_in_emitted_tokens_applies(make_engine: Make, reference: PreTrainedModel) -> None:
    prompt = prompt_of(20)
    plain = greedy(reference, prompt, 8)
    sampling = {"banned_token_sequences": [plain[3:5]]}
    engine = make_engine()
    engine.add(ask("whole", prompt, sampling=sampling))
    whole = tokens(run(engine)["whole"])
    assert whole[:4] == plain[:4] and whole[4] != plain[4]
    engine.add(ask("rest", prompt, sampling=sampling, output_token_ids=plain[:4]))
    assert tokens(run(engine)["rest"]) == whole[4:]


@pytest.mark.parametrize(
    ("stage", "steps", "sampling"),
    [("waiting", 0, {}), ("running", 1, CONTINUED["penalties"]), ("held", 3, CONTINUED["penalties"])],
)
def test_a_prefill_whose_hand_off_fails_continues_here(
    make_engine: Make, stage: str, steps: int, sampling: dict[str, Any]
) -> None:
    engine = make_engine()
    engine.add(ask("whole", prompt_of(150), sampling=sampling))
    whole = tokens(run(engine)["whole"])
    engine = make_engine()
    engine.add(ask("a", prompt_of(150), sampling=sampling), prefill_only=True)
    outputs = [output for _ in range(steps) for output in engine.step().outputs]
    assert engine.has_work() == (stage != "held")
    engine.resume("a")
    outputs += run(engine)["a"]
    assert tokens(outputs) == whole
    engine.abort("a")
    assert_empty(engine)


def test_a_held_prefill_keeps_its_blocks_until_released(make_engine: Make) -> None:
    engine = make_engine()
    engine.add(ask("a", prompt_of(40)), prefill_only=True)
    assert len(run(engine)["a"]) == 1
    assert len(engine.computed("a")[0].blocks) == 3
    assert engine.blocks.num_blocks - engine.blocks.available == 3
    engine.abort("a")
    engine.abort("a")
    assert_empty(engine)


def test_a_reservation_is_activated_or_freed(make_engine: Make, reference: PreTrainedModel) -> None:
    prompt = prompt_of(40)
    prefill, decode = make_engine(), make_engine()
    first, covered = hand_over(prefill, decode, ask("a", prompt))
    assert covered == 0 and first + tokens(run(decode)["a"]) == greedy(reference, prompt, 8)
    again = decode.reserve(ask("b", prompt))
    assert again is not None
    assert again.covered == 32
    assert (decode.stats().prefix_query_tokens, decode.stats().prefix_hit_tokens) == (80, 32)
    assert not decode.abort("b")
    again.sequence_blocks.free()
    assert_empty(decode)


@pytest.mark.parametrize("missing", [1, 8, 9, 40])
def test_a_handed_over_prompt_may_lack_its_last_tokens(
    make_engine: Make, reference: PreTrainedModel, missing: int
) -> None:
    """They are computed before the first decode step, from any position."""
    prompt = prompt_of(40)
    prefill, decode = make_engine(), make_engine()
    prefill.add(ask("a", prompt), prefill_only=True)
    first = tokens(run(prefill)["a"])
    reservation = decode.reserve(ask("a", prompt))
    assert reservation is not None
    num_computed = len(prompt) - missing
    whole = -(-num_computed // 16)
    source, target = prefill.computed("a")[0].blocks[:whole], reservation.sequence_blocks.blocks[0][:whole]
    decode.pool.memory.fill_(0xFF)  # NaN
    decode.pool.memory[target] = prefill.pool.memory[source]
    decode.pool.segment("target")[target[-1:], :, :, (num_computed - 1) % 16 + 1 :] = torch.nan
    decode.activate(reservation, first[0], num_computed)
    result = decode.step()
    assert result.num_tokens == missing + 1
    assert first + tokens(result.outputs) + tokens(run(decode)["a"]) == greedy(reference, prompt, 8)
    assert decode.blocks.num_cached == (len(prompt) + 7) // 16
    assert_empty(decode)


INT8, FP8 = ({"foreign_format": f"float32/{name}"} for name in ("int8", "fp8"))


@pytest.mark.parametrize(
    "turns",
    [[(INT8, 0), (INT8, 32), (FP8, 0), ({}, 0), ({}, 32)], [({"shareable": False}, 0), ({}, 0), ({}, 32)]],
    ids=["foreign formats", "other content than was said"],
)
def test_blocks_are_shared_only_within_their_format(
    make_engine: Make, turns: list[tuple[dict[str, Any], int]]
) -> None:
    prompt, prefill, decode = prompt_of(40), make_engine(), make_engine()
    for number, (how, found) in enumerate(turns):
        assert hand_over(prefill, decode, ask(str(number), prompt), **how)[1] == found
        run(decode)
        assert_empty(decode)


def test_a_request_may_fill_the_context_and_no_more(make_engine: Make) -> None:
    engine = make_engine()
    engine.add(ask("fits", prompt_of(MAX_LEN - 8), 8))
    assert len(tokens(run(engine)["fits"])) == 8
    with pytest.raises(InvalidRequestError, match=f"limit of {MAX_LEN} tokens"):
        engine.add(ask("too long", prompt_of(MAX_LEN - 8), 9))


def test_prompt_logprobs_across_chunks(make_engine: Make, reference: PreTrainedModel) -> None:
    prompt = prompt_of(100)
    engine = make_engine()
    engine.add(ask("warm", prompt))
    run(engine)
    engine.add(ask("a", prompt, max_tokens=1, sampling={"prompt_logprobs": 2, "logprobs": 2}))
    output = run(engine)["a"][0]
    with torch.inference_mode():
        exact = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    first, *entries = paged_logprobs(output.prompt_logprobs or [])
    assert first is None
    got = [entry.logprob for entry in entries if entry is not None]
    want = [float(exact[index, token]) for index, token in enumerate(prompt[1:])]
    assert got == pytest.approx(want, abs=1e-3)
    assert output.logprobs is not None
    assert output.logprobs[0].logprob == pytest.approx(float(exact[-1].max()), abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"max_tokens": MAX_LEN}, "max_tokens"),
        ({"sampling": {"temperature": float("nan")}}, "temperature"),
        ({"sampling": {"logprobs": 1000}}, "logprobs"),
        ({"sampling": {"stop_token_ids": [VOCAB_SIZE]}}, "stop_token_ids"),
        ({"output_token_ids": [VOCAB_SIZE]}, "output_token_ids"),
        ({"output_token_ids": [5] * 8}, "output_token_ids"),
    ],
)
def test_bad_requests_are_refused_by_field(make_engine: Make, changes: dict[str, Any], field: str) -> None:
    engine = make_engine()
    arguments: dict[str, Any] = {"prompt": [1, 2, 3], **changes}
    with pytest.raises(InvalidRequestError) as refused:
        engine.add(ask("a", **arguments))
    assert refused.value.field == field
    assert_empty(engine)


def test_a_pool_too_small_for_one_sequence_names_the_flag(make_engine: Make) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
        make_engine(num_blocks=16)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_float32_compiles_nothing_if_the_native_decoder_knows_the_model(
    quantization: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It logs its choice at the start, and gives Transformers' tokens."""
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("it compiles"))
    write_tiny_llama(tmp_path)
    options = {
        "max_model_len": MAX_LEN,
        "kv_cache_memory_bytes": 64 * BLOCK_BYTES,
        "quantization": quantization,
    }
    caplog.set_level("INFO", "tandem.engine")
    monkeypatch.setattr(phases, "SLOW_S", 0.0)
    engine = tiny_engine(tmp_path, compile="auto", **options)
    assert [text for text in caplog.messages if text.endswith(" ...")] == [
        f"loading the weights of {tmp_path.name} (0.00 GB), which takes seconds for each GB ...",
        "warming up by measured steps, which takes seconds ...",
    ]
    assert re.search(r"warming up by measured steps took \d+\.\d s", caplog.text)
    modules = tiny_engine(tmp_path, compile="off", **options)
    assert engine.start_up["forward"] == "native decoder"
    prompts = [prompt_of(length, length) for length in (1, 5, 33, 150)]
    for index, prompt in enumerate(prompts):
        engine.add(ask(str(index), prompt))
        modules.add(ask(str(index), prompt))
    outputs, expected = run(engine), run(modules)
    for index, prompt in enumerate(prompts):
        assert tokens(outputs[str(index)]) == tokens(expected[str(index)])
        if quantization is None:
            assert tokens(outputs[str(index)]) == greedy(load(tmp_path), prompt, 8)


def test_a_step_that_lost_its_lent_cores_is_not_learned_from(make_engine: Make):
    engine = make_engine()
    engine.borrow(lambda: False)
    first = engine.times.costs()
    engine.add(ask("disturbed", prompt_of(40)))
    run(engine)
    assert engine.times.costs() == first
    engine.borrow(lambda: True)
    engine.add(ask("undisturbed", prompt_of(40, seed=1)))
    run(engine)
    assert engine.times.costs() != first


def test_without_paging_requests_wait_for_whole_room(folder: Path) -> None:
    """A sequence has blocks for the longest one from its first step on."""
    prompts = {name: prompt_of(20, seed) for seed, name in enumerate("abcd")}
    answers, most = {}, {}
    for paged in (True, False):
        room = 2 * (MAX_LEN // 16 + 4) * BLOCK_BYTES
        options = {"max_model_len": MAX_LEN, "max_num_seqs": 8, "kv_cache_memory_bytes": room}
        engine = tiny_engine(folder, paged_kv=paged, **options)
        for name, prompt in prompts.items():
            engine.add(ask(name, prompt, max_tokens=20))
        engine.step()
        most[paged] = engine.stats().num_running
        assert engine.stats().free_blocks <= (34 if paged else 8)
        answers[paged] = {name: tokens(outputs) for name, outputs in run(engine).items()}
        assert_empty(engine)
    assert most == {True: 4, False: 2}
    assert all(answers[True][name][-19:] == answers[False][name][-19:] for name in prompts)
