"""Times of work on a device, and of its launch by the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

_WARM_UPS, _LEAST_RUNS, _LEAST_S = 3, 5, 0.2
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
"""Names of calls that launch work on the device. Some calls have a suffix."""


class MedianTimes(NamedTuple):
    """Medians of one run: `device_s` until the device has finished, `host_s` until the call returns."""

    device_s: float
    host_s: float


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_of(work: Callable[[], object], device: torch.device) -> MedianTimes:
    for _ in range(_WARM_UPS):
        work()
    _wait(device)
    taken: list[MedianTimes] = []
    ends_at = time.perf_counter() + _LEAST_S
    while len(taken) < _LEAST_RUNS or time.perf_counter() < ends_at:
        started = time.perf_counter()
        work()
        returned = time.perf_counter()
        _wait(device)
        taken.append(MedianTimes(time.perf_counter() - started, returned - started))
    return MedianTimes(*(statistics.median(side) for side in zip(*taken, strict=True)))


def launches_of(work: Callable[[], object], device: torch.device) -> int | None:
    """Count the launches that `work` makes on the device; None if they cannot be counted."""
    if device.type != "cuda":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        _wait(device)
    return sum(each.count for each in profile.key_averages() if each.key.startswith(_LAUNCHES))
