"""Kernels of attention on the GPU with their serving tiles, compared with torch's backend in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.torch.attention import TorchBackend
from tests.engine.interpreted.cases import FORMATS, Case, Options, Sequence, Shape, Step, sequences

CUDA = torch.device("cuda")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCE = {FP32: 1e-5, FP16: 2e-3, BF16: 1.6e-2}
OPTIONS = [
    Options(),
    Options(sliding_window=700, sinks=True),
    Options(sliding_window=3, softcap=5.0),
]
LONG = (
    Sequence(1, 1700, 1),
    Sequence(8, 1100, 2),
    Sequence(9, 620, 3, tree=True, earlier=4),
    Sequence(200, 900, 4),
    Sequence(64, 64, 5),
)
"""A decode row and rows to verify over several splits, a tree, a chunk, and a prompt."""


def computed(step: Step) -> torch.Tensor:
    return step.to(CUDA).run(TritonBackend)


def check(case: Case) -> None:
    expected = Step.of(case).in_float64().run(TorchBackend)
    out = computed(Step.of(case)).cpu()
    tolerance = TOLERANCE[case.shape.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


KINDS = [
    (Shape(FP32, "none", 2, 2, 16, 16, 16), Options(), ""),
    (Shape(BF16, "none", 1, 7, 33, 17, 5), Options(sinks=True), "trees"),
    (Shape(FP16, "none", 2, 3, 64, 64, 32), Options(sliding_window=20), ""),
    (Shape(BF16, "none", 1, 4, 40, 24, 16), Options(sliding_window=3, softcap=5.0), "trees"),
    (Shape(BF16, "none", 2, 1, 8, 32, 16), Options(softcap=0.4), "first keys"),
    (Shape(FP32, "int8_row_scales", 1, 2, 40, 24, 16), Options(sliding_window=50), ""),
    (Shape(BF16, "int8_row_scales", 2, 4, 64, 64, 16), Options(), "trees"),
    (Shape(FP32, "fp8_row_scales", 1, 7, 8, 32, 5), Options(sinks=True), ""),
    (Shape(BF16, "fp8_row_scales", 2, 3, 16, 16, 32), Options(sliding_window=1), "first keys"),
]
"""Layers, and what rows may have. They are few, since Triton takes seconds to compile the kernels of each.
`test_further_forms.py` has all others.
"""


@st.composite
def small_steps(draw: st.DrawFn) -> Case:
    shape, options, has = draw(st.sampled_from(KINDS))
    batch = draw(st.lists(sequences(), min_size=1, max_size=2))
    if has != "trees":
        batch = [replace(each, tree=False, earlier=0) for each in batch]
    if has != "first keys":
        batch = [replace(each, first_key=0) for each in batch]
    return Case(shape, options, tuple(batch), draw(st.integers(0, 2)))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(small_steps())
def test_small_steps(case: Case) -> None:
    check(case)


SHAPES = [
    Shape(BF16, key_dim=key, value_dim=value) for key, value in [(64, 64), (256, 256), (512, 512), (192, 128)]
]
LATENT = Shape(BF16, "none", 1, 40, 576, 512, values_in_keys=True)
OTHER_FORMATS = [each for each in FORMATS if each != (BF16, "none")]
LAYERS = [
    *((Shape(BF16, "none", 2, 4, 128, 128), options) for options in OPTIONS),
    *((Shape(*each, 2, 4, 128, 128), options) for each, options in zip(OTHER_FORMATS, cycle(OPTIONS))),
    *((shape, OPTIONS[0]) for shape in (*SHAPES, LATENT)),
]
"""Layers of long contexts. `test_further_forms.py` has the others."""


@pytest.mark.parametrize(("shape", "options"), LAYERS, ids=str)
def test_long_contexts(shape: Shape, options: Options) -> None:
    check(Case(shape, options, LONG, padding=2))


@pytest.mark.parametrize(("dtype", "quantization"), FORMATS, ids=str)
def test_rows_have_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype, quantization: str) -> None:
    crowd = Case(Shape(dtype, quantization, 2, 4, 128, 128), Options(), LONG * 3)
    together = computed(Step.of(crowd))
    for index in range(len(LONG)):
        alone = computed(Step.of(crowd.alone(index)))
        assert torch.equal(together[crowd.rows_of(index)], alone)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("group", "dims", "format"),
    [(4, (128, 128), FORMATS[1]), (4, (128, 128), FORMATS[-1]), (2, (512, 512), FORMATS[1])],
    ids=str,
)
def test_a_row_has_the_same_bits_in_every_chunk(
    group: int, dims: tuple[int, int], format: tuple[torch.dtype, str], options: Options
) -> None:
    """As a decode row, among rows to verify, and in chunks of several sizes."""
    shape = Shape(*format, 2, group, *dims)
    together = computed(Step.of(Case(shape, options, (Sequence(200, 1100, 3),))))
    for rows in (1, 8, 40, 64, 65, 120):
        out = computed(Step.of(Case(shape, options, (Sequence(rows, 1100, 3),))))
        assert torch.equal(out, together[-rows:]), rows


def test_the_pool_gets_the_same_bytes_as_by_torch() -> None:
    for dtype, quantization in FORMATS:
        case = Case(Shape(dtype, quantization), Options(), LONG[:3])
        ours, theirs = Step.of(case).to(CUDA), Step.of(case)
        ours.run(TritonBackend)
        theirs.run(TorchBackend)
        for mine, expected in zip(ours.layer, theirs.layer, strict=True):
            options = {"atol": 0, "rtol": 0, "equal_nan": True, "check_device": False}
            torch.testing.assert_close(mine, expected, **options)  # both are None if KV is not quantized
