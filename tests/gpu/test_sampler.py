"""The sampler's kernels on the GPU choose the same tokens as a CPU."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings

from engine.sampler import Sampler
from tests.engine.sampling_cases import EDITS, FILTERS, Case, cases

CUDA = torch.device("cuda")


def check(case: Case) -> None:
    logits, rows = case.batch()
    expected, failed = Sampler(case.vocab_size, "cpu", [0]).choose(logits, rows)
    sampler = Sampler(case.vocab_size, CUDA, [0])
    assert sampler.has_kernels
    found, found_to_fail = sampler.choose(logits.to(CUDA), rows)
    assert found_to_fail == failed
    assert [token for row, token in enumerate(found.tolist()) if row not in failed] == [
        token for row, token in enumerate(expected.tolist()) if row not in failed
    ]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(cases(vocab_sizes=(1, 65, 333)))  # few, since Triton compiles the kernels for each
def test_small_vocabularies(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("vocab_size", [32_000, 151_936, 262_144])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_vocabularies_of_models(vocab_size: int, dtype: torch.dtype) -> None:
    for seed, spread in enumerate((0.3, 2.0, 5.0)):
        edits = tuple([*EDITS][number % len(EDITS)] for number in range(len(FILTERS)))
        check(Case(tuple(FILTERS), edits, vocab_size, dtype, spread, -math.inf, 0.2, seed))
