"""Which graphs are captured, and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from engine.cuda import graphs
from engine.cuda.graphs import Graph, capture_all
from engine.step_inputs import StepShape

GIB = 1 << 30
SHAPES = [StepShape(rows=rows, blocks=blocks) for rows in (1, 2, 4) for blocks in (8, 16)]


class Device:
    """Each capture takes memory, and time."""

    def __init__(self, nbytes: int, seconds: float = 0.0, too_large: int = 1000, refused: int = 0) -> None:
        self.free, self.now = 8 * GIB, 100.0
        self._nbytes, self._seconds, self._too_large = nbytes, seconds, too_large
        self._refused = refused
        self.order: list[StepShape] = []

    def free_bytes(self) -> int:
        return self.free

    def new(self) -> Graph:
        raise AssertionError

    def fault(self, work: Callable[[], object]) -> str:
        raise AssertionError

    def capture(self, shape: StepShape) -> Graph:
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


def test_what_waits_for_the_device_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))

    def wait() -> None:
        assert modes[-1] == "error"
        raise RuntimeError("called a synchronizing CUDA operation\nsomewhere")

    found = graphs.CudaGraphs(torch.device("cuda"))
    assert found.fault(wait) == "called a synchronizing CUDA operation"
    assert found.fault(lambda: None) == ""
    assert modes == ["error", "default"] * 2


@pytest.mark.parametrize(
    ("device", "count"),
    [
        (Device(GIB // 8), 6),
        (Device(2 * GIB), 3),
        (Device(0, seconds=25.0), 3),
        (Device(0, too_large=2), 4),
        (Device(0, refused=2), 2),
    ],
    ids=["all", "as memory goes", "as time goes", "but for what is too large", "until one is refused"],
)
def test_the_largest_are_captured_first(
    device: Device, count: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs.time, "monotonic", lambda: device.now)
    caplog.set_level(logging.INFO, "tandem.engine")
    captured = capture_all(SHAPES, device.capture, device)
    assert len(captured) == count
    assert list(captured) == device.order == sorted(device.order, key=lambda s: (-s.rows, -s.blocks))
    *refusal, line = caplog.messages
    assert all("stream is capturing" in each for each in refusal)
    assert line.startswith(f"captured {count} of 6 CUDA graphs in {device.now - 100:.1f} s (at most 60 s)")
    assert f"{(8 * GIB - device.free) / GIB:.2f} GiB (at most 4.00 GiB)" in line
