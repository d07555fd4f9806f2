"""Kernels on the GPU in forms that the first run leaves out, since Triton takes seconds to compile each."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is for Linux")

from tests.engine import sampling_cases
from tests.engine.interpreted.cases import FORMATS, Case, Options, Shape, cases
from tests.gpu.test_kernels import LAYERS, LONG, OPTIONS, check
from tests.gpu.test_sampler import check as check_sampler

any_cases = settings(deadline=None, derandomize=True, database=None)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@settings(any_cases, max_examples=30)
@given(data=st.data())
def test_small_steps(format: tuple[torch.dtype, str], data: st.DataObject) -> None:
    """Any layer with any rows."""
    check(data.draw(cases([format])))


OTHERS = [(Shape(*format, 2, 4, 128, 128), options) for format in FORMATS for options in OPTIONS]


@pytest.mark.parametrize(("shape", "options"), [each for each in OTHERS if each not in LAYERS], ids=str)
def test_long_contexts(shape: Shape, options: Options) -> None:
    check(Case(shape, options, LONG, padding=2))


@settings(any_cases, max_examples=200)
@given(sampling_cases.cases())
def test_small_vocabularies(case: sampling_cases.Case) -> None:
    check_sampler(case)
