"""The compiled choice takes the same tokens as torch's operators."""

from __future__ import annotations

import math
import platform
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.sampler import Sampler, SamplingRow, TorchSampler, native
from native.build import _cpu as cpu_of_build
from native.build import build
from tests.engine.sampler_reference import make_row
from tests.engine.sampling_cases import FILTERS, Case, cases, equal_scores, exact_nuclei, make_rows

needs_compiler = pytest.mark.skipif(native.compiled() is None, reason="needs a C++ compiler")


def plain_sampler(vocab_size: int, grammars: Any = None) -> Sampler:
    """Return a sampler by torch's operators."""
    return Sampler(vocab_size, "cpu", [0], grammars, TorchSampler())


def choose_both_ways(
    logits: Tensor, rows: list[SamplingRow], grammars: Any = None
) -> tuple[list[int], list[int]]:
    """Return the common result of the compiled choice and torch's operators: tokens, and failed rows. Drafts,
    which they draw with other noise, and their distributions are equal too.
    """
    vocab_size = logits.shape[1]
    samplers = Sampler(vocab_size, "cpu", [0], grammars), plain_sampler(vocab_size, grammars)
    (tokens, failed_rows), (expected, expected_to_fail) = (each.choose(logits, rows) for each in samplers)
    assert failed_rows == expected_to_fail
    assert tokens.dtype == torch.int64 and ((tokens >= 0) & (tokens < vocab_size)).all()
    sound = [row for row in range(len(rows)) if row not in failed_rows]
    assert tokens[sound].tolist() == expected[sound].tolist()
    starts = [row.position - row.position % 5 for row in rows]
    (drawn, drawn_from), (expected, expected_from) = (
        each.draw_drafts(logits, rows, starts) for each in samplers
    )
    torch.testing.assert_close(drawn_from[sound], expected_from[sound], atol=1e-7, rtol=1e-5)
    assert drawn[sound].tolist() == expected[sound].tolist()
    assert (drawn_from.gather(1, drawn.unsqueeze(1)) > 0).all()
    return tokens.tolist(), failed_rows


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++ in PATH")
def test_it_builds_if_there_is_a_compiler() -> None:
    assert build(Path(native.__file__).parent / "choose.cpp").exists()


@needs_compiler
def test_a_cpu_chooses_by_it_where_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Sampler(9, "cpu", []).is_native
    monkeypatch.setattr("engine.sampler.sampler.compiled", lambda: None)
    assert not Sampler(9, "cpu", []).is_native


@needs_compiler
@settings(max_examples=150, deadline=None, database=None)
@given(cases([*range(1, 9), 15, 64, 127, 128, 130, 333, 1000, 4096], most_rows=8))
def test_batches(case: Case) -> None:
    choose_both_ways(*case.batch())


@needs_compiler
def test_drafts_without_a_finite_score_carry_their_distribution() -> None:
    logits = torch.randn(2, 50)
    logits[1] = torch.nan
    tokens, drawn_from = Sampler(50, "cpu", [0]).draw_drafts(logits, make_rows(2, random.Random(0)), [0, 0])
    assert drawn_from.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])
    assert drawn_from[1, tokens[1]] == 1.0


@needs_compiler
def test_a_large_vocabulary_on_several_threads(threads_restored: None) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(2)
    rows = make_rows(len(FILTERS), random.Random(2))
    choose_both_ways(3 * torch.randn(len(rows), 151_936, dtype=torch.bfloat16), rows)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_values", [1, 2, 5])
def test_equal_values(num_values: int, dtype: torch.dtype) -> None:
    """Both zeros are equal, too. In random batches they are seldom the greatest values of a greedy row."""
    torch.manual_seed(4)
    rows = make_rows(4 * len(FILTERS), random.Random(4))
    for vocab_size in (9, 300, 2000):
        logits = torch.randint(num_values, (len(rows), vocab_size)).to(dtype) - (num_values - 1)
        logits[torch.rand(logits.shape) < 0.5] *= -1 if num_values == 1 else 1
        logits[(logits == 0) & (torch.rand(logits.shape) < 0.5)] = -0.0
        choose_both_ways(logits, rows)


@needs_compiler
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("one", "other"), [(3, 150), (150, 3)])
def test_among_equal_scores_the_lowest_id_wins(one: int, other: int, temperature: float) -> None:
    found = [choose_both_ways(logits, [row])[0] for row, logits in equal_scores(one, other, temperature)]
    assert found == [[3]] * len(found) and len(found) > 10


@pytest.mark.parametrize("way", ["torch", pytest.param("native", marks=needs_compiler)])
def test_a_nucleus_ends_at_exactly_top_p(way: str) -> None:
    """The next token is outside."""
    sampler = plain_sampler(3) if way == "torch" else Sampler(3, "cpu", [0])
    nuclei = list(exact_nuclei(-7.0))
    for logits, *bounds in nuclei:
        for top_p, size in zip(bounds, (1, 2), strict=True):
            _, distributions = sampler.draw_drafts(logits, [make_row("r", top_k=2, top_p=top_p)], [0])
            assert int((distributions > 0).sum()) == size
    assert len(nuclei) > 10


@needs_compiler
def test_a_nucleus_of_nearly_everything() -> None:
    """After rounding of sums, top_p may exceed the total."""
    torch.manual_seed(13)
    rows = make_rows(300, random.Random(13), ["top-p nearly 1"])
    logits = -5.0 - 1e-3 * torch.rand(len(rows), 1000)
    logits[:, 9] = 0.0
    choose_both_ways(logits, rows)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", [0, 77, 299])
def test_rows_that_fail(place: int, dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    rows = make_rows(6 * len(FILTERS), random.Random(6))
    logits = 3 * torch.randn(len(rows), 300).to(dtype)
    logits[1::6, place] = math.nan
    logits[2::6, place] = -math.nan
    logits[3::6, place] = math.inf
    logits[4::6] = -math.inf
    for number in range(5, len(rows), 6):
        params = FILTERS[[*FILTERS][number % len(FILTERS)]]
        rows[number] = make_row(str(number), allowed_token_ids=[7], banned_token_sequences=[[7]], **params)
    failed_rows = choose_both_ways(logits, rows)[1]
    assert failed_rows == [row for row in range(len(rows)) if row % 6]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_that_are_part_of_others(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    rows = make_rows(len(FILTERS), random.Random(7))
    wide = 3 * torch.randn(3 * len(rows), 500).to(dtype)
    for part in (wide[::3, 100:333], wide[: len(rows), ::2], wide[:60, : len(rows)].T):
        assert choose_both_ways(part, rows) == choose_both_ways(part.contiguous(), rows)


@needs_compiler
def test_probabilities_of_a_batch_with_applied_edits() -> None:
    torch.manual_seed(9)
    rows = [make_row("a", seed=1, logit_bias={3: 2.0}, top_k=9), make_row("b", seed=2)]
    logits = torch.randn(2, 50)
    sampler, fresh = Sampler(50, "cpu", []), Sampler(50, "cpu", [])
    sampler.choose(logits, rows)
    assert torch.equal(sampler.probabilities(logits, rows), fresh.probabilities(logits, rows))


@needs_compiler
def test_long_calls_let_other_threads_run() -> None:
    sampler, rows = Sampler(2**18, "cpu", []), make_rows(16, random.Random(11), ["none"])
    logits, ticks, is_over = torch.zeros(16, 2**18), [], threading.Event()

    def tick() -> None:
        while not is_over.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    sampler.choose(logits, rows)
    ended = time.perf_counter()
    is_over.set()
    thread.join()
    assert sum(started < tick < ended for tick in ticks) > 4


@needs_compiler
def test_as_many_rows_as_logits() -> None:
    with pytest.raises(ValueError, match="2 rows"):
        Sampler(9, "cpu", []).choose(torch.zeros(1, 9), [make_row("a"), make_row("b")])


@needs_compiler
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3", "x86-64-v4"])
def test_portable_code_chooses_the_same_tokens(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares the code for less capable CPUs."""
    if platform.machine() != "x86_64" or (level.endswith("v4") and "avx512f" not in cpu_of_build()):
        pytest.skip(f"this CPU has no {level}")
    torch.manual_seed(14)
    rows = make_rows(20 * len(FILTERS), random.Random(14))
    logits = 3 * torch.randn(len(rows), 1000).bfloat16()
    expected = choose_both_ways(logits, rows)[0]
    monkeypatch.setattr("native.build._NATIVE", [f"-march={level}"])
    sampler = Sampler(1000, "cpu", [], row_sampler=native.NativeSampler())
    assert sampler.choose(logits, rows)[0].tolist() == expected


def test_without_a_compiler_torch_samples_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(12)
    logits, rows = torch.randn(len(FILTERS), 60), make_rows(len(FILTERS), random.Random(12))
    expected = Sampler(60, "cpu", []).sample(logits, rows).token_ids
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    compiled: Any = native.compiled
    compiled.cache_clear()
    try:
        samplers = [Sampler(60, "cpu", []) for _ in range(2)]
    finally:
        compiled.cache_clear()
    assert [sampler.sample(logits, rows).token_ids for sampler in samplers] == [expected] * 2
    assert caplog.text.count("no C++ compiler") == 1
