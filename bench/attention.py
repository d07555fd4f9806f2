"""Times the attention backends layer by layer against torch's SDPA over gathered contexts.

    python -m bench.attention [--threads 2] [--dtype bfloat16] [--shape small] [--cases decode,prefill]

Prints a step's attention over all layers of the shape in milliseconds (best of interleaved runs), the ratio
to the torch backend, and the rate at which the kernel reads keys and values.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.interface import AttentionBackend, AttentionMetadata, LayerKv
from engine.attention.select import available_backends, select_backend
from engine.host_memory import host_zeros

BLOCK_SIZE = 16
POOL_BYTES = 3 << 30  # a pool with all layers of the longest cases would not fit: time fewer and scale up


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    layers: int


SHAPES = {"small": Shape(8, 4, 64, 8), "large": Shape(16, 8, 128, 32)}
CASES: dict[str, list[tuple[int, int, int]]] = {  # (batch, query_len, context_len)
    "decode": [(batch, 1, context) for context in (320, 2048, 8192) for batch in (1, 4, 16, 64)],
    "prefill": [(1, 256, 256), (1, 256, 2048), (1, 512, 512), (1, 512, 8192), (16, 256, 256)],
}


class Case:
    """One packed step of equal sequences over a pool with as many of the layers as fit."""

    def __init__(self, shape: Shape, dtype: torch.dtype, batch: int, query_len: int, context: int) -> None:
        blocks_each = -(-context // BLOCK_SIZE)
        num_blocks = batch * blocks_each
        layer_bytes = num_blocks * 2 * BLOCK_SIZE * shape.kv_heads * shape.head_dim * dtype.itemsize
        self.layers = max(1, min(shape.layers, POOL_BYTES // layer_bytes))
        self.scale_up = shape.layers / self.layers
        self.read_bytes = layer_bytes * shape.layers
        block = (self.layers, 2, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
        self.pool = host_zeros(layer_bytes * self.layers).view(dtype).view(num_blocks, *block)
        self.pool.fill_(0.5)
        table = torch.randperm(num_blocks).view(batch, blocks_each).int()
        positions = torch.arange(context - query_len, context)
        slots = table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        self.metadata = AttentionMetadata(
            query_start=torch.arange(0, batch * query_len + 1, query_len).int(),
            context_len=torch.full((batch,), context).int(),
            block_table=table,
            slot_mapping=slots.flatten(),
            max_query_len=query_len,
            max_context_len=context,
        )
        rows = batch * query_len
        self.query = torch.randn(rows, shape.heads, shape.head_dim).to(dtype)
        self.key = torch.randn(rows, shape.kv_heads, shape.head_dim).to(dtype)
        self.value = torch.randn(rows, shape.kv_heads, shape.head_dim).to(dtype)

    def step(self, backend: AttentionBackend) -> float:
        """Seconds for all layers of the shape."""
        started = time.perf_counter()
        backend.begin_step(self.metadata)
        for layer in range(self.layers):
            out = self.forward(backend, layer)
        elapsed = time.perf_counter() - started
        assert out.shape == self.query.shape
        return elapsed * self.scale_up

    def forward(self, backend: AttentionBackend, layer: int) -> Tensor:
        return backend.forward(
            layer, self.query, self.key, self.value, scale=0.1, sliding_window=None, softcap=None
        )


def measure(case: Case, names: list[str], seconds: float) -> dict[str, float]:
    """Best seconds of a step by backend, in interleaved runs."""
    backends = {
        name: select_backend(case.pool.device, case.pool.dtype, name)[0](
            [LayerKv.of(layer) for layer in case.pool.unbind(1)]
        )
        for name in names
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    for backend in backends.values():
        case.step(backend)
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(times[names[0]]) < 3:
        for name, backend in backends.items():
            times[name].append(case.step(backend))
    return {name: min(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the attention backends.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--cases", default="decode,prefill", help="comma-separated: decode, prefill")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each case")
    parser.add_argument("--backends", default=",".join(available_backends(torch.device("cpu"))))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype, shape = getattr(torch, arguments.dtype), SHAPES[arguments.shape]
    names = arguments.backends.split(",")
    print(f"{shape}, {arguments.dtype}, {arguments.threads} threads, ms per step, all layers")
    print(f"{'':22}" + "".join(f"{name:>10}" for name in names) + f"{'ratio':>8}{'GB/s':>8}")
    for kind in arguments.cases.split(","):
        for batch, query_len, context in CASES[kind]:
            case = Case(shape, dtype, batch, query_len, context)
            times = measure(case, names, arguments.seconds)
            cells = "".join(f"{times[name] * 1e3:10.3f}" for name in names)
            ratio = times[names[-1]] / times[names[0]]
            rate = case.read_bytes / times[names[0]] / 1e9
            print(f"{batch:3} x {query_len:4} of {context:6}  {cells}{ratio:8.1f}{rate:8.1f}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
