"""The sampler's kernels in Triton's interpreter choose the same tokens as torch's operators and the compiled
choice."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.sampler import Sampler, SamplingRow, TorchSampler
from engine.sampler.triton_kernel import chooser, scan
from engine.sampler.triton_kernel.chooser import TritonSampler
from tests.engine.sampler.test_grammars import Fixed, masked_rows
from tests.engine.sampler_reference import make_row
from tests.engine.sampling_cases import EDITS, FILTERS, Case, cases, equal_scores, exact_nuclei, make_rows

CPU = torch.device("cpu")
few = settings(max_examples=6, deadline=None, database=None)


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Use small tiles, so that small vocabularies have several of everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chooser, "TILE", 64)
        patch.setattr(chooser, "_GROUP", 16)
        patch.setattr(chooser, "_WIDTH", 4)
        torch.set_num_threads(1)
        yield


def samplers(vocab_size: int) -> tuple[Sampler, Sampler, Sampler]:
    """Return samplers with the kernels, with torch's operators, and with the CPU's own code."""
    kernels, plain, own = (
        Sampler(vocab_size, CPU, [0], row_sampler=each) for each in (TritonSampler(CPU), TorchSampler(), None)
    )
    return kernels, plain, own


def test_masked_rows() -> None:
    vocab_size = 333
    torch.manual_seed(6)
    rows = masked_rows(vocab_size)[:16]
    logits = 3 * torch.randn(len(rows), vocab_size, dtype=torch.bfloat16)
    found, *others = (
        Sampler.choose(each, logits, rows) for each in with_grammars(samplers(vocab_size), Fixed(vocab_size))
    )
    for tokens, failed in others:
        assert failed == found[1]
        unlike = (tokens != found[0]).nonzero()[:, 0].tolist()
        assert set(unlike) <= set(failed)


def with_grammars(samplers: Iterable[Sampler], grammars: Any) -> Iterator[Sampler]:
    for each in samplers:
        each.grammars = grammars
        yield each


def choose(logits: Tensor, rows: list[SamplingRow]) -> tuple[list[int], list[int]]:
    """Return the common choice of all samplers: tokens, and failed rows."""
    before = logits.clone()
    found, *others = (each.choose(logits, rows) for each in samplers(logits.shape[1]))
    failed_rows = found[1]
    for tokens, failed in others:
        assert failed == failed_rows
        for row, (token, expected) in enumerate(zip(found[0].tolist(), tokens.tolist(), strict=True)):
            assert token == expected or row in failed, (row, rows[row].params)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return found[0].tolist(), failed_rows


@few
@given(cases())
def test_batches(case: Case) -> None:
    """Each row also has the token that it has alone."""
    logits, rows = case.batch()
    found, failed_rows = choose(logits, rows)
    kernels, _, _ = samplers(case.vocab_size)
    for number, row in enumerate(rows[:2]):
        token, failed = kernels.choose(logits[number : number + 1], [row])
        assert token.tolist() == [found[number]] and failed == [0] * (number in failed_rows)


def test_rows_of_all_filters_and_edits() -> None:
    names = list(EDITS)
    edits = tuple(names[number % len(names)] for number in range(len(FILTERS)))
    choose(*Case(tuple(FILTERS), edits, 150, torch.bfloat16, 3.0, -math.inf, 0.2, 1).batch())


def test_edits_of_winning_tokens() -> None:
    for seed in range(2):
        choose(*Case(("greedy",) * len(EDITS), tuple(EDITS), 6, torch.float32, 1.0, 0.0, 0.2, seed).batch())
    logits = torch.zeros(1, 10)
    logits[0, 9], logits[0, 5] = 2.0, torch.tensor(2.0) / 1.3
    row = make_row("equal", output=(9,), temperature=0.0, repetition_penalty=1.3)
    assert choose(logits, [row])[0] == [5]
    logits = torch.full((1, 10), 0.5)
    logits[0, 1] = 1.0  # of the prompt alone
    row = make_row("prompt", temperature=0.0, repetition_penalty=1.01, presence_penalty=0.7)
    assert choose(logits, [row])[0] == [1]


def test_a_vocabulary_of_several_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "TILE", 4096)
    monkeypatch.setattr(chooser, "_GROUP", 64)
    monkeypatch.setattr(chooser, "_WIDTH", 16)
    torch.manual_seed(2)
    rows = make_rows(2, random.Random(2), ["none", "top-k, top-p"])
    choose(4 * torch.randn(2, 10_000, dtype=torch.bfloat16), rows)


def test_rows_that_fail() -> None:
    torch.manual_seed(3)
    rows = make_rows(6, random.Random(3), ["none", "top-k, top-p"])
    for temperature in (1.0, 0.0):
        banned: dict[str, Any] = {"allowed_token_ids": [7], "banned_token_sequences": [[7]]}
        rows.append(make_row(seed=1, temperature=temperature, **banned))
    logits = torch.randn(8, 150)
    logits[1, 77], logits[2, 0], logits[3, 149], logits[4, 80] = math.nan, -math.nan, math.inf, -math.inf
    logits[5] = -math.inf
    assert choose(logits, rows)[1] == [1, 2, 3, 5, 6, 7]
    logits = torch.zeros(2, 100).index_fill(1, torch.tensor(70), math.nan)
    rows = [make_row(banned_token_sequences=[[70]]), make_row(allowed_token_ids=[5, 99])]
    assert choose(logits, rows)[1] == [], "a forbidden logit may be NaN"


def test_among_equal_scores_the_lowest_id_wins() -> None:
    found = [choose(logits, [row])[0] for row, logits in equal_scores(150, 3)]
    assert found == [[3]] * len(found) and len(found) > 5
    assert choose(torch.zeros(1, 200), [make_row(temperature=0.0)])[0] == [0]


def test_a_nucleus_ends_at_exactly_top_p() -> None:
    """The next token is outside."""
    for logits, *bounds in itertools.islice(exact_nuclei(-0.1), 2):
        rows = [make_row(seed=seed, top_k=2, top_p=top_p) for top_p in bounds for seed in range(4)]
        found, _ = choose(logits.expand(len(rows), -1).contiguous(), rows)
        assert found[:4] == [0] * 4


def test_a_rows_threshold_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tiles share the k-th greatest peak, and greedy rows need none."""
    searched: list[int] = []

    def counted(values: Any, k: Any, found: Any = scan._kth) -> Any:
        searched.append(int(k.handle.data.item()))
        return found(values, k)

    monkeypatch.setattr(scan, "_kth", counted)
    rows = [make_row(str(k), seed=k, top_k=k) for k in (3, 9, 40)]
    rows.append(make_row("greedy", temperature=0.0, top_k=5))
    choose(torch.randn(4, 333), rows)
    assert searched == [3, 9, 40]


def test_distributions_and_drafts() -> None:
    """Distributions equal torch's, and drafts use the compiled choice's noise."""
    vocab_size = 150
    names = ["none", "hottest", "greedy", "top-k 1", "top-p of many", "min-p", "top-k, top-p", "all"]
    rows = make_rows(len(names), random.Random(8), names)
    rows.append(make_row(seed=3, min_p=0.2, top_p=0.7, temperature=1.5))
    rows.append(make_row(seed=1, allowed_token_ids=[7], banned_token_sequences=[[7]]))
    rows.append(make_row(seed=2, frequency_penalty=0.5, output=(1, 1, 2), logit_bias={3: 4.0}))
    logits = 2 * torch.randn(len(rows), vocab_size, generator=torch.Generator().manual_seed(8))
    logits[0, 5] = -40.0
    kernels, plain, _ = samplers(vocab_size)
    starts = [row.position - number % 3 for number, row in enumerate(rows)]
    tokens, found = kernels.draw_drafts(logits, rows, starts)
    expected_tokens, expected = plain.draw_drafts(logits, rows, starts)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
    assert torch.equal(found > 0, expected > 0)
    assert tokens[-2] == -1 and not found[-2].any()
    sound = [*range(len(names) + 1), -1]
    assert torch.equal(tokens[sound], expected_tokens[sound])


def test_more_rows_than_one_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    monkeypatch.setattr(chooser, "LISTS_BYTES", 2 * 100 * 10)
    monkeypatch.setattr(chooser, "_ALIGNED_ROWS", 2)
    rows = make_rows(4, random.Random(5), ["hot", "top-p tiny", "greedy"])
    rows.append(make_row("edited", output=(1, 1, 2), seed=5, temperature=0.0, frequency_penalty=2.0))
    logits = torch.randn(10, 100)
    logits[8, 1], logits[8, 9] = 9.0, 8.0
    assert choose(logits[::2], rows)[0][4] == 9
    choose(torch.randn(100, 5).T, rows)
