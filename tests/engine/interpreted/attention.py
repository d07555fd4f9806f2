"""The Triton attention kernels in Triton's interpreter, compared with torch's backend.

`test_interpreted_kernels.py` runs this module in another process: TRITON_INTERPRET must be set before Triton
is imported. `ATTENTION_STEPS=300 pytest tests/engine/devices/test_interpreted_kernels.py` draws that many
random steps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import example, given, settings
from triton.runtime import interpreter

from engine.devices.cuda.attention import backend, tiles
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.torch.attention import TorchBackend
from engine.kv.attention import AttentionMetadata, AttentionOptions, LayerKv
from engine.kv.row_codes import CODE_DTYPES
from tests.engine.interpreted.cases import Case, Options, Sequence, Shape, Step, cases

TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
few = settings(max_examples=3, deadline=None, database=None)


TILE_OF, SPLIT = tiles.tile_of, tiles.SPLIT
"""The choices on a GPU, before `conftest.py` replaces them."""


class _Grids:
    """A kernel that is only launched: its name and number of programs go to `launched`."""

    def __init__(self, name: str, launched: list[tuple[str, int]]) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: self._launched.append((self._name, math.prod(grid)))


@pytest.fixture(autouse=True, scope="module")
def smaller_tiles() -> Iterator[None]:
    """Use short chunks, and merge few splits together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CHUNK", 7)
        patch.setattr(backend, "_MERGED_TOGETHER", 2)
        # The interpreter multiplies bfloat16's bits as integers.
        patch.setattr(backend, "MULTIPLIED", dict.fromkeys(backend.MULTIPLIED, tl.float32))
        torch.set_num_threads(1)
        yield


def near(out: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    tolerance = tolerance or TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def narrow(sequence: Sequence, sliding_window: int | None = None) -> Case:
    return Case(Shape(kv_heads=1), Options(sliding_window=sliding_window), (sequence,))


# Rows see keys up to, and from, the edges of blocks of 16 keys, splits of 32, and merged splits.
@example(narrow(Sequence(3, 17, 1)))
@example(narrow(Sequence(1, 37, 1), sliding_window=20))
@example(narrow(Sequence(2, 75, 1), sliding_window=20))
@example(narrow(Sequence(2, 100, 1)))
# A tree of the most keys, whose window and rows lie in four splits.
@example(narrow(Sequence(6, 114, 1, tree=True, earlier=58), sliding_window=20))
@settings(few, max_examples=int(os.environ.get("ATTENTION_STEPS", "16")))
@given(cases())
def test_it_equals_torch(case: Case) -> None:
    step = Step.of(case)
    expected = step.in_float64().run(TorchBackend)
    step.forget_unseen()
    near(step.run(TritonBackend), expected)


@few
@given(cases())
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(case: Case) -> None:
    crowd = replace(case, sequences=(*case.sequences, Sequence(2, 40, 11), Sequence(7, 12, 12, tree=True)))
    together = Step.of(crowd).run(TritonBackend)
    for index in range(len(case.sequences)):
        alone = Step.of(crowd.alone(index)).run(TritonBackend)
        assert torch.equal(together[crowd.rows_of(index)], alone)
    assert not together[len(together) - case.padding :].any()


@pytest.mark.parametrize(
    "options",
    [Options(), Options(sliding_window=67, sinks=True), Options(sliding_window=3, softcap=5.0)],
    ids=str,
)
def test_rows_to_verify_have_the_bits_of_decode_rows(options: Options) -> None:
    """A row's window begins in another split than the first row's, and three splits remain to be merged."""
    shape, context = Shape(kv_heads=1), 66 + (options.sliding_window or 3)
    together = Step.of(Case(shape, options, (Sequence(6, context, 3),))).run(TritonBackend)
    for row in range(6):
        step = Step.of(Case(shape, options, (Sequence(6 - row, context, 3),)))
        assert torch.equal(step.run(TritonBackend), together[row:])


def test_tiles_without_room_for_their_parts_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step.of(Case(Shape(kv_heads=1), Options(sinks=True), (Sequence(5, 70, 1), Sequence(6, 90, 2))))
    whole = step.run(TritonBackend)
    for room in (1, 4000):
        monkeypatch.setattr(backend, "PARTS_BYTES", room)
        assert torch.equal(step.run(TritonBackend), whole)


LAYERS = {
    "head 64": (Shape(torch.bfloat16, kv_heads=1, key_dim=64, value_dim=64), Options()),
    "head 512": (Shape(torch.bfloat16, kv_heads=1, key_dim=512, value_dim=512), Options()),
    "latents": (
        Shape(torch.bfloat16, kv_heads=1, group=3, key_dim=576, value_dim=512, values_in_keys=True),
        Options(),
    ),
    "window and soft cap": (
        Shape(torch.bfloat16, kv_heads=1),
        Options(sliding_window=20, softcap=5.0, sinks=True),
    ),
    "int8": (Shape(torch.bfloat16, "int8_row_scales", kv_heads=1), Options(sinks=True)),
    "fp8": (Shape(torch.bfloat16, "fp8_row_scales", kv_heads=1), Options(sliding_window=50)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_row_has_the_same_bits_in_every_chunk(layer: str) -> None:
    """As a decode row, among rows to verify, and in chunks of several sizes."""
    shape, options = LAYERS[layer]
    together = Step.of(Case(shape, options, (Sequence(40, 70, 3),))).run(TritonBackend)
    for rows in (1, 6, 7, 17):
        out = Step.of(Case(shape, options, (Sequence(rows, 70, 3),))).run(TritonBackend)
        assert torch.equal(out, together[-rows:]), rows


@pytest.mark.parametrize(("key_dim", "value_dim"), [(512, 512), (192, 128), (72, 256)])
def test_large_heads(key_dim: int, value_dim: int) -> None:
    shape = Shape(kv_heads=1, key_dim=key_dim, value_dim=value_dim)
    step = Step.of(Case(shape, Options(), (Sequence(2, 20, 1),)))
    near(step.run(TritonBackend), step.in_float64().run(TorchBackend))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(576, 512), (40, 24)])
def test_values_stored_within_keys(key_dim: int, value_dim: int) -> None:
    """Given values are not read."""
    shape = Shape(kv_heads=1, group=3, key_dim=key_dim, value_dim=value_dim, values_in_keys=True)
    step = Step.of(Case(shape, Options(), (Sequence(2, 20, 1), Sequence(9, 40, 2)), padding=1))
    query, key, value = step.new
    expected = step.in_float64().run(TorchBackend)
    near(replace(step, new=(query, key, torch.full_like(value, torch.nan))).run(TritonBackend), expected)


def test_groups_larger_than_a_tile() -> None:
    step = Step.of(Case(Shape(kv_heads=1, group=20), Options(sinks=True), (Sequence(3, 40, 1),)))
    near(step.run(TritonBackend), step.in_float64().run(TorchBackend))


@pytest.mark.parametrize("quantization", ["none", "int8_row_scales", "fp8_row_scales"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_pool_gets_the_same_bytes_as_by_torch(dtype: torch.dtype, quantization: str) -> None:
    steps = [
        Step.of(Case(Shape(dtype, quantization, key_dim=64), Options(), (Sequence(8, 9, 1),))) for _ in "ab"
    ]
    for step, cls in zip(steps, (TritonBackend, TorchBackend), strict=True):
        key, value = step.new[1:]
        key[0] = 0
        key[1] *= 1e-32  # too small for a scale
        key[2] *= 1e30
        key[3, 0] = torch.linspace(-448, 448, 64).to(dtype)
        key[4, 0] = torch.linspace(-127, 127, 64).to(dtype)
        value[3, 1, 5] = torch.inf
        value[4, 1, 5] = torch.nan
        step.run(cls)
    for ours, theirs in zip(steps[0].layer, steps[1].layer, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("quantization", ["int8_row_scales", "fp8_row_scales"])
def test_every_code_is_read_as_its_value(quantization: str) -> None:
    """A row that sees only itself gives its value, which contains all codes at a scale of 1."""
    shape = Shape(torch.float32, quantization, kv_heads=1, value_dim=256)
    step = Step.of(Case(shape, Options(), (Sequence(1, 1, 1),)))
    codes = torch.arange(256, dtype=torch.uint8).view(CODE_DTYPES[quantization]).float()
    most = 127 if quantization == "int8_row_scales" else 448
    values = codes.nan_to_num(0.0).clamp(min=-most)
    step.new[2][0, 0] = values
    near(step.run(TritonBackend)[0], values.double().expand(2, -1))


def test_programs_may_run_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program writes where another one does."""
    sequences = Sequence(3, 70, 1), Sequence(9, 20, 2)
    step = Step.of(Case(Shape(group=3), Options(sinks=True), sequences, padding=1))
    expected = step.run(TritonBackend)
    builder = interpreter.interpreter_builder
    begin = builder.set_grid_idx
    monkeypatch.setattr(
        builder,
        "set_grid_idx",
        lambda *place: begin(*(size - 1 - i for size, i in zip(builder.grid_dim, place, strict=True))),
    )
    assert torch.equal(step.run(TritonBackend), expected)


def test_pools_of_more_elements_than_32_bits_count() -> None:
    """Only the few written pages exist."""
    step = Step.of(
        Case(Shape(torch.float32, "int8_row_scales", kv_heads=1), Options(), (Sequence(2, 20, 1),))
    )
    expected = step.run(TritonBackend)
    far = torch.empty(4 << 30, dtype=torch.uint8)
    layer = LayerKv(
        *(
            far[place << 20 :]
            .view(side.dtype)
            .as_strided(side.shape, ((1 << 30) // side.itemsize, *side.stride()[1:]))
            for place, side in enumerate(step.layer)
        )
    )
    for side, there in zip(step.layer, layer, strict=True):
        there.copy_(side)
    assert int(step.metadata.block_table.max()) > 1
    assert torch.equal(replace(step, layer=layer).run(TritonBackend), expected)


def test_a_row_of_a_sequence_may_be_padding() -> None:
    step = Step.of(Case(Shape(kv_heads=1), Options(), (Sequence(3, 50, 1), Sequence(9, 20, 2))))
    slots = step.metadata.slot_mapping.clone()
    slots[[2, 11]] = -1
    step = replace(step, metadata=replace(step.metadata, slot_mapping=slots))
    expected = step.run(TritonBackend)
    assert not expected[[2, 11]].any() and expected[[1, 10]].all()


def test_one_long_request_among_many_starts_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """127 with 1,000 keys each and one with 100,000, in the tiles and on the multiprocessors of an H100."""
    monkeypatch.setattr(tiles, "tile_of", TILE_OF)
    monkeypatch.setattr(tiles, "SPLIT", SPLIT)
    device = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    most = backend._most_programs(torch.device("cuda"))
    monkeypatch.setattr(backend, "_most_programs", lambda _: most)
    launched: list[tuple[str, int]] = []
    for name in ("attend", "merge"):
        monkeypatch.setattr(backend, name, _Grids(name, launched))
    pages, contexts = torch.zeros(1, 2, 16, 8, 128, dtype=torch.bfloat16), [1000] * 127 + [100_000]
    own = TritonBackend([LayerKv.of(pages)])
    own.begin_step(
        AttentionMetadata(
            query_start=torch.arange(129, dtype=torch.int32),
            context_len=torch.tensor(contexts, dtype=torch.int32),
            block_table=torch.zeros(128, 6250, dtype=torch.int32),
            slot_mapping=torch.zeros(128, dtype=torch.int64),
            max_query_len=1,
            max_context_len=131_072,
        )
    )
    own.attend(0, torch.zeros(128, 32, 128, dtype=torch.bfloat16), AttentionOptions(0.1))
    assert [name for name, _ in launched] == ["attend", "merge", "attend"]
    assert sum(programs for _, programs in launched) == 1584 < 2000
    ((_, plan),) = own._plans.items()
    full = [-(-context // SPLIT) - 1 for context in contexts]
    assert plan.full_start.diff()[:128].tolist() == full and plan.sequence[:128].tolist() == [*range(128)]


def test_unsupported_inputs_are_refused() -> None:
    step = Step.of(Case(Shape(), Options(), (Sequence(1, 1, 1),)))
    with pytest.raises(RuntimeError, match="begin_step must come before forward"):
        TritonBackend([step.layer]).forward(0, *step.new, AttentionOptions(1.0))
    for wrong, message in (
        (Shape(key_dim=1040), "head_dim 1040: the triton kernel takes at most 512"),
        (Shape(torch.float64), "layers of torch.float64 are not rows of float64"),
    ):
        with pytest.raises(ValueError, match=message):
            Step.of(Case(wrong, Options(), (Sequence(1, 1, 1),))).run(TritonBackend)
    query, key, value = step.new
    for new, message in (
        ((query, key[:, :1], value), "are not"),
        ((query[:, :3], key, value), "does not fit"),
        ((query.half(), key, value), "must be of the pool's torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            replace_new(step, new).run(TritonBackend)


def replace_new(step: Step, new: Any) -> Step:
    return Step(step.case, step.layer, step.metadata, new, step.sinks)


def test_a_step_without_sequences() -> None:
    step = Step.of(Case(Shape(), Options(), (Sequence(1, 1, 1),), padding=3))
    metadata = replace(
        step.metadata,
        query_start=torch.zeros(1, dtype=torch.int32),
        context_len=torch.zeros(0, dtype=torch.int32),
        block_table=torch.zeros(0, 1, dtype=torch.int32),
        slot_mapping=torch.full((4,), -1),
        max_query_len=0,
        max_context_len=0,
    )
    out = Step(step.case, step.layer, metadata, step.new, None).run(TritonBackend)
    assert not out.any()
