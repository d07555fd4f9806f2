"""Times a decoder's matrix products in bfloat16 by our kernel against torch's (oneDNN).

    python -m bench.products [--threads 1] [--hidden 384] [--layers 6] [--rows 1,5,16,32,100,400]

Prints what all layers' products take (medians of interleaved runs), the ratio of torch's time to ours, and
the rates at which ours reads weights and multiplies.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.linear.packed import PackedLinear


def layers(hidden: int, count: int) -> list[nn.Linear]:
    """Queries with keys and values, attention's output, gate with up, and down, of `count` decoder layers."""
    shapes = [(hidden, 2 * hidden), (hidden, hidden), (hidden, 6 * hidden), (3 * hidden, hidden)]
    return [nn.Linear(*shape, bias=False).bfloat16() for _ in range(count) for shape in shapes]


def run_seconds(modules: Sequence[nn.Module], inputs: Sequence[Tensor]) -> float:
    started = time.perf_counter()
    for module, x in zip(modules, inputs, strict=True):
        module(x)
    return time.perf_counter() - started


def measure(ours: Sequence[nn.Module], torchs: Sequence[nn.Linear], rows: int, seconds: float) -> list[float]:
    """Median seconds of ours and of torch's."""
    inputs = [torch.randn(rows, linear.in_features).bfloat16() for linear in torchs]
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 5:
        times.append((run_seconds(ours, inputs), run_seconds(torchs, inputs)))
    return [statistics.median(column) for column in zip(*times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Times matrix products in bfloat16.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", default="1,5,16,32,100,400", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each number of rows")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torchs = layers(arguments.hidden, arguments.layers)
    ours = [PackedLinear(linear) for linear in torchs]
    weights = sum(linear.weight.numel() for linear in torchs)
    print(f"{2 * weights / 1e6:.1f} MB of weights, {arguments.threads} threads")
    print(f"{'rows':>6}{'ours, ms':>10}{'torch, ms':>11}{'ratio':>7}{'GB/s':>7}{'GFLOP/s':>9}")
    for rows in map(int, arguments.rows.split(",")):
        mine, its = measure(ours, torchs, rows, arguments.seconds)
        rates = f"{2 * weights / mine / 1e9:7.1f}{2 * rows * weights / mine / 1e9:9.0f}"
        print(f"{rows:6}{mine * 1e3:10.3f}{its * 1e3:11.3f}{its / mine:7.2f}{rates}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
