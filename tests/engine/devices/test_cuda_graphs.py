"""The choice of captured graphs, and the log's report of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.batch.step_inputs import StepShape
from engine.devices.cuda import runner
from engine.devices.cuda.runner import CudaGraph, capture_all, stand_ins

GIB = 1 << 30
SHAPES = [StepShape(rows=rows, blocks=blocks) for rows in (1, 2, 4) for blocks in (8, 16)]


class Device:
    """A device on which each capture takes memory and time."""

    def __init__(self, nbytes: int, seconds: float = 0.0, too_large: int = 1000, refused: int = 0) -> None:
        self.free, self.now = 8 * GIB, 100.0
        self._nbytes, self._seconds, self._too_large = nbytes, seconds, too_large
        self._refused = refused
        self.order: list[StepShape] = []

    def free_bytes(self) -> int:
        return self.free

    def new(self) -> CudaGraph:
        raise AssertionError

    def fault(self, work: Callable[[], object]) -> str:
        raise AssertionError

    def capture(self, shape: StepShape) -> Captured:
        if shape.rows > self._too_large:
            raise torch.OutOfMemoryError
        if shape.rows <= self._refused:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.free -= self._nbytes
        self.now += self._seconds
        self.order.append(shape)
        return Captured()


class Captured:
    def capture(self, work: Callable[[], object]) -> None: ...

    def replay(self) -> None: ...


def test_steps_that_wait_for_the_device_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))

    def wait() -> None:
        assert modes[-1] == "error"
        raise RuntimeError("called a synchronizing CUDA operation\nsomewhere")

    found = runner.CudaGraphs(torch.device("cuda"))
    assert found.fault(wait) == "called a synchronizing CUDA operation"
    assert found.fault(lambda: None) == ""
    assert modes == ["error", "default"] * 2


def shapes(rows_each: int, *sequences: int) -> list[StepShape]:
    return [
        StepShape(n * rows_each, n * rows_each, n, rows_each, blocks) for n in sequences for blocks in (8, 16)
    ]


@pytest.mark.parametrize(
    ("device", "count"),
    [
        (Device(GIB // 8), 6),
        (Device(2 * GIB), 3),
        (Device(0, seconds=25.0), 3),
        (Device(0, too_large=2), 4),
        (Device(0, refused=2), 1),
    ],
    ids=["all", "as memory goes", "as time goes", "but for what is too large", "until one is refused"],
)
def test_the_largest_is_captured_first_then_the_smallest(
    device: Any, count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner.time, "monotonic", lambda: device.now)
    caplog.set_level(logging.INFO, "tandem.engine")
    captured = capture_all(SHAPES, device.capture, device)
    order = [shape for shape in [SHAPES[-1], *SHAPES[:-1]] if shape.rows <= device._too_large]
    assert list(captured) == device.order == order[:count]
    *refusal, line = caplog.messages
    assert all("stream is capturing" in each for each in refusal)
    assert line.startswith(f"captured {count} of 6 CUDA graphs in {device.now - 100:.1f} s (at most 60 s)")
    assert f"{(8 * GIB - device.free) / GIB:.2f} GiB (at most 4.00 GiB)" in line


def test_each_number_of_rows_per_sequence_has_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """If time runs out, the largest of each kind are captured, and of the others the smallest."""
    device: Any = Device(0, seconds=10.0)
    monkeypatch.setattr(runner.time, "monotonic", lambda: device.now)
    decode, verify = shapes(1, 1, 2, 4, 8), shapes(3, 1, 2, 4)
    captured = capture_all([*verify, *decode], device.capture, device)
    assert list(captured) == [verify[-1], decode[-1], *decode[:4], verify[0]]
    missing = dict.fromkeys(decode[4:7], decode[-1]) | dict.fromkeys(verify[1:5], verify[-1])
    assert stand_ins([*verify, *decode], captured) == missing


def test_of_the_largest_graphs_the_one_with_adapters_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It also takes steps without adapters, but with enough time these have their own."""
    plain = shapes(1, 1, 2, 4)
    adapted = [replace(shape, adapters=True) for shape in plain]
    device: Any = Device(0, seconds=15.0)
    monkeypatch.setattr(runner.time, "monotonic", lambda: device.now)
    captured = capture_all([*adapted, *plain], device.capture, device)
    assert list(captured) == [adapted[-1], plain[0], adapted[0], plain[1], adapted[1]]
    taken = stand_ins([*adapted, *plain], captured)
    assert taken == dict.fromkeys([*adapted[2:-1], *plain[2:]], adapted[-1])
    assert stand_ins(adapted[:1], plain) == {}


def test_a_step_without_a_graph_takes_the_smallest_that_fits() -> None:
    """Fewest rows come first, then fewest keys. Trees' graphs take chains, but chains' graphs take
    no trees.
    """
    one, tree = StepShape(1, 1, 1, 1, 8), StepShape(3, 3, 1, 3, 8, trees=True)
    long, wide = StepShape(2, 2, 2, 1, 16), StepShape(8, 8, 8, 1, 8)
    assert stand_ins([one], [wide, long]) == {one: long}
    assert stand_ins([one], [wide, tree]) == {one: tree}
    assert stand_ins([tree], [one, wide]) == {}
    assert stand_ins([StepShape(1, 1, 1, 1, 16)], [wide]) == {}
    assert stand_ins([one], [one, wide]) == {}


def test_a_refused_capture_does_not_leave_the_thread_on_another_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = ["the engine's"]

    @contextmanager
    def on(stream: str) -> Iterator[None]:
        before, current[0] = current[0], stream
        try:
            yield
        finally:
            current[0] = before

    class Refused:
        """A capture that, like `torch.cuda.graph`, ends before it leaves its stream."""

        def __enter__(self) -> None:
            current[0] = "the capture's"

        def __exit__(self, *args: object) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **options: Refused())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraph((0, 0)).capture(lambda: None)
    assert current == ["the engine's"]
