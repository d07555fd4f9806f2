"""Times a layer's experts, packed for our kernel in each format, against Transformers' module in bfloat16.

    python -m bench.experts [--threads 2] [--hidden 1024] [--inner 512] [--experts 64] [--chosen 8]

Prints milliseconds, medians of interleaved runs with several layers' experts in turn, and the ratio of the
faster one of Transformers' implementations to ours.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from engine.linear.experts import join_experts, pack_experts, split_experts
from engine.linear.packed_quantized import pack_quantized_linears
from engine.linear.rounding import round_layers
from engine.quantization.weight import CodeFormat

THEIRS = ("grouped_mm", "batched_mm")
FORMATS = (None, CodeFormat.INT8, CodeFormat.INT4, CodeFormat.MXFP4)


def made(config: Qwen3MoeConfig, layers: int) -> nn.ModuleList:
    """Random experts of so many layers."""
    experts = nn.ModuleList(Qwen3MoeExperts(config).bfloat16() for _ in range(layers))
    for parameter in experts.parameters():
        parameter.requires_grad_(False).normal_(std=0.02)
    return experts


def packed(plain: nn.ModuleList, format: CodeFormat | None) -> nn.ModuleList:
    experts = copy.deepcopy(plain)
    if format is None:
        pack_experts(experts)
    else:
        split_experts(experts)
        round_layers(experts, format)
        pack_quantized_linears(experts)
        join_experts(experts)
    return experts


def seconds(layers: nn.ModuleList, inputs: Sequence[Tensor]) -> float:
    started = time.perf_counter()
    for layer in layers:
        layer(*inputs)
    return (time.perf_counter() - started) / len(layers)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times experts that Transformers holds as one tensor.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", default="1,4,16,256", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each number of rows")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = Qwen3MoeConfig(
        hidden_size=arguments.hidden,
        moe_intermediate_size=arguments.inner,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.chosen,
    )
    plain = made(config, arguments.layers)
    ours = {format.value if format else "bf16": packed(plain, format) for format in FORMATS}
    print(f"{'rows':>5}{''.join(f'{name:>12}' for name in (*THEIRS, *ours))}   ms, and ratios")
    for rows in map(int, arguments.rows.split(",")):
        chosen = torch.rand(rows, arguments.experts).topk(arguments.chosen).indices
        weights = torch.full(chosen.shape, 1 / arguments.chosen, dtype=torch.bfloat16)
        inputs = torch.randn(rows, arguments.hidden).bfloat16(), chosen, weights
        times: dict[str, list[float]] = {name: [] for name in (*THEIRS, *ours)}
        end = time.perf_counter() + arguments.seconds
        while time.perf_counter() < end or len(times["bf16"]) < 3:
            for name in THEIRS:
                config._experts_implementation = name
                times[name].append(seconds(plain, inputs))
            for name, layers in ours.items():
                times[name].append(seconds(layers, inputs))
        medians = {name: statistics.median(each) * 1e3 for name, each in times.items()}
        best = min(medians[name] for name in THEIRS)
        ratios = ", ".join(f"{name} {best / medians[name]:.2f}" for name in ours)
        print(f"{rows:5}{''.join(f'{each:12.3f}' for each in medians.values())}   {ratios}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
