"""Log-probabilities are those of the raw logits."""

import math

import pytest
import torch

from engine.sampler import Sampler
from engine.sampler.logprobs import _entries, _found, _together, _top, _top_without_wait
from tests.engine.sampler_reference import make_row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_log_softmax_before_any_processing(dtype):
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


def test_a_row_has_the_same_bits_alone_and_in_a_batch_on_two_threads():
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
