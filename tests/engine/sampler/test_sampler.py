"""The sampler equals its plain definition, and log-probabilities are those before any processing."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from engine.sampler import Sampler
from engine.sampler.logprobs import _entries, _found, _together, _top, _top_without_wait
from protocol.sampling import check_sampling_params
from tests.engine.sampler_reference import make_row, reference_sample
from tests.engine.sampling_cases import PARAMS

EOS = [0]


def crowd(vocab_size: int, generator: random.Random):
    """Return one row for every entry of PARAMS, with its own history and seed."""
    rows = []
    for name, params in PARAMS.items():
        known = min(vocab_size, 5 if name == "banned" else 40)
        prompt = [generator.randrange(known) for _ in range(generator.randint(1, 30))]
        output = [generator.randrange(known) for _ in range(generator.randint(0, 30))]
        rows.append(make_row(name, prompt, output, seed=generator.randint(-(2**63), 2**63 - 1), **params))
        check_sampling_params(rows[-1].params, vocab_size, 20)
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("vocab_size", [37, 1000, 5003])
def test_a_mixed_batch_equals_the_plain_definition(vocab_size, spread, dtype):
    generator = random.Random(vocab_size)
    torch.manual_seed(vocab_size)
    sampler = Sampler(vocab_size, "cpu", EOS)
    for _ in range(3):
        rows = crowd(vocab_size, generator)
        logits = (spread * torch.randn(len(rows), vocab_size)).to(dtype)
        for row in rows:
            sampler.forget(row.request_id)
        got = sampler.sample(logits, rows)
        expected = [reference_sample(logits[i], row, EOS) for i, row in enumerate(rows)]
        assert dict(zip(PARAMS, got.token_ids, strict=True)) == dict(zip(PARAMS, expected, strict=True))
        assert got.failed_rows == []


@pytest.mark.parametrize("params", [{}, {"min_p": 1e-12}, {"top_p": 1 - 1e-9}, {"top_k": 5999}])
def test_many_unlikely_tokens_beat_a_likely_one_together(params):
    """Each is 12 nats down, so only the greatest noise makes one of them win."""
    vocab_size = 100_000 if not params.get("top_k") else 6000
    logits = torch.full((64, vocab_size), -12.0)
    logits[:, 5] = 0.0
    logits += 1e-3 * torch.randn(64, vocab_size, generator=torch.Generator().manual_seed(0))
    rows = [make_row(str(seed), seed=seed, **params) for seed in range(64)]
    tokens = Sampler(vocab_size, "cpu", EOS).sample(logits, rows).token_ids
    assert tokens == [reference_sample(logits[i], row, EOS) for i, row in enumerate(rows)]
    assert len(set(tokens)) > 10 or vocab_size == 6000


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.5, "repetition_penalty": 2.0}])
def test_the_callers_logits_are_not_changed(params):
    logits = torch.randn(2, 50)
    before = logits.clone()
    Sampler(50, "cpu", EOS).sample(logits, [make_row("a", **params), make_row("b", **params)])
    assert torch.equal(logits, before)


def test_no_rows_give_no_tokens():
    assert Sampler(50, "cpu", EOS).sample(torch.empty(0, 50), []).token_ids == []


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.0, "presence_penalty": 0.1}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_among_equals_the_lowest_id_wins(params, dtype):
    logits = torch.zeros(2, 5000, dtype=dtype)
    logits[0, [4321, 77, 3000]] = 2.0
    logits[1, [5, 4999]] = 1.0
    rows = [make_row("a", **params), make_row("b", **params)]
    assert Sampler(5000, "cpu", EOS).sample(logits, rows).token_ids == [77, 5]
    rows[1] = make_row("b", seed=1)
    assert Sampler(5000, "cpu", EOS).sample(logits, rows).token_ids[0] == 77


def test_equal_values_are_filtered_alike():
    logits = torch.tensor([[3.0, 3.0, 3.0, 1.0, 1.0, -5.0]])
    for params, possible in (
        ({"top_k": 2}, {0, 1, 2}),
        ({"top_p": 0.3}, {0, 1, 2}),
        ({"min_p": 1.0}, {0, 1, 2}),
        ({"top_k": 4}, {0, 1, 2, 3, 4}),
    ):
        drawn = {
            Sampler(6, "cpu", EOS).sample(logits, [make_row(seed=seed, **params)]).token_ids[0]
            for seed in range(200)
        }
        assert drawn == possible, params


def test_an_eos_token_beyond_the_logits_harms_no_other_row():
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    rows = [make_row("a", min_tokens=1, temperature=0.0), make_row("b", temperature=0.0)]
    assert Sampler(2, "cpu", [2, 3]).sample(logits, rows).token_ids == [1, 1]


def test_several_positions_of_one_request_in_one_batch():
    """As in verification of drafts: each row has the output that precedes its token."""
    torch.manual_seed(7)
    params: dict[str, Any] = {
        "seed": 11,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "temperature": 0.8,
    }
    sampler = Sampler(40, "cpu", EOS)
    drafts = [5, 9, 5, 30]
    rows = [make_row("r", [1, 2], drafts[:i], **params) for i in range(5)]
    logits = torch.randn(5, 40)
    assert sampler.sample(logits, rows).token_ids == [
        reference_sample(logits[i], row, EOS) for i, row in enumerate(rows)
    ]
    after_rejection = [make_row("r", [1, 2], [5, 8, *[7] * i], **params) for i in range(3)]
    assert sampler.sample(logits[:3], after_rejection).token_ids == [
        reference_sample(logits[i], row, EOS) for i, row in enumerate(after_rejection)
    ]


def test_a_batch_that_changes_from_step_to_step():
    generator = random.Random(9)
    torch.manual_seed(9)
    sampler = Sampler(100, "cpu", EOS)
    rows = crowd(100, generator)
    for _ in range(30):
        present = generator.sample(rows, generator.randint(1, len(rows)))
        logits = 2 * torch.randn(len(present), 100)
        tokens = sampler.sample(logits, present).token_ids
        assert tokens == [reference_sample(logits[i], row, EOS) for i, row in enumerate(present)]
        for row, token in zip(present, tokens, strict=True):
            row.output_token_ids.append(token)
            row.position += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_log_softmax_before_any_processing(dtype):
    torch.manual_seed(0)
    logits = (3 * torch.randn(4, 300)).to(dtype)
    rows = [
        make_row("a", logprobs=5, temperature=0.3, top_k=2),
        make_row("b"),
        make_row("c", logprobs=0, logit_bias={3: 100.0}),
        make_row("d", logprobs=2, temperature=0.0, repetition_penalty=2.0),
    ]
    got = Sampler(300, "cpu", []).sample(logits, rows)
    expected = logits.float().log_softmax(dim=-1)
    assert got.logprobs[1] is None
    assert got.token_ids[2] == 3
    for index in (0, 2, 3):
        entry, row = got.logprobs[index], expected[index]
        token = got.token_ids[index]
        assert entry.logprob == pytest.approx(row[token].item(), abs=1e-5)
        assert entry.rank == 1 + int((row > row[token]).sum())
        count = rows[index].params.logprobs
        assert entry.top_logprobs == pytest.approx(row.topk(count).values.tolist(), abs=1e-5)
        assert len(entry.top_token_ids) == count
        if count and dtype == torch.float32:
            assert entry.top_token_ids == row.topk(count).indices.tolist()


def test_logprobs_have_the_same_bits_alone_and_in_a_batch_on_two_threads():
    """One row's sum over a large vocabulary is what torch may split between threads."""
    torch.manual_seed(0)
    logits, threads = 4 * torch.randn(32, 50_000), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        sampler = Sampler(50_000, "cpu", [])
        together = sampler.prompt_logprobs(logits, [*range(32)], 2)
        assert [*(sampler.prompt_logprobs(logits[i : i + 1], [i], 2)[0] for i in range(32))] == together
    finally:
        torch.set_num_threads(threads)


def test_among_equals_the_lower_id_comes_first():
    logits = torch.zeros(1, 4000)
    logits[0, [3999, 12, 700]] = 1.0
    (entry,) = Sampler(4000, "cpu", []).prompt_logprobs(logits, [700], 5)
    assert entry.top_token_ids == [12, 700, 3999, 0, 1]
    assert entry.rank == 1


def test_forbidden_tokens_have_a_finite_value_for_json():
    logits = torch.tensor([[0.0, -math.inf]])
    (entry,) = Sampler(2, "cpu", []).prompt_logprobs(logits, [1], 2)
    assert entry.logprob == -9999.0
    assert entry.top_logprobs == [0.0, -9999.0]
    assert entry.rank == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_affects_no_other(bad):
    logits = torch.zeros(3, 8)
    logits[1, 2] = bad
    rows = [make_row(str(i), temperature=0.0, logprobs=3) for i in range(3)]
    got = Sampler(8, "cpu", []).sample(logits, rows)
    assert got.failed_rows == [1]
    assert got.logprobs[1].top_logprobs == [-9999.0] * 3
    for index in (0, 2):
        assert got.logprobs[index].top_token_ids == [0, 1, 2]
        assert got.logprobs[index].logprob == pytest.approx(-math.log(8))


def test_more_alternatives_than_tokens():
    (entry,) = Sampler(2, "cpu", []).prompt_logprobs(torch.tensor([[0.0, 1.0]]), [0], 20)
    assert entry.top_token_ids == [1, 0]


def test_prompt_logprobs_over_several_pieces(monkeypatch):
    monkeypatch.setattr("engine.sampler.logprobs._MAX_ELEMENTS", 2 * 300)
    torch.manual_seed(1)
    logits = torch.randn(5, 300)
    entries = Sampler(300, "cpu", []).prompt_logprobs(logits, [1, 2, 3, 4, 5], 1)
    expected = logits.log_softmax(dim=-1)
    assert [entry.logprob for entry in entries] == pytest.approx(
        [expected[i, i + 1].item() for i in range(5)], abs=1e-5
    )
    assert [entry.top_token_ids[0] for entry in entries] == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("count", [0, 1, 7, 300])
def test_a_device_finds_the_same_likeliest_tokens(count):
    """Also among equal values, including zeros of both signs."""
    torch.manual_seed(1)
    values = torch.randint(-9, 9, (40, 300)) / 4
    values[torch.rand(values.shape) < 0.3] = -0.0
    values[torch.rand(values.shape) < 0.2] = -math.inf
    values[0] = -math.inf
    values[1] *= 1e38
    assert torch.equal(_top_without_wait(values, count), _top(values, count))


def test_one_copy_brings_everything_from_the_device():
    torch.manual_seed(2)
    found = _found(3 * torch.randn(4, 50), torch.tensor([3, 0, 49, 7]), 5)
    assert _entries(_together(found, torch.clone), [5, 0, 3, 1]) == _entries(found, [5, 0, 3, 1])
