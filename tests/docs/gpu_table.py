"""Writes the figures of each compiled Triton kernel into the tables of docs/gpu.md, in a few minutes:
`python -m tests.docs.gpu_table`. A kernel of a new line needs only its name there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from engine.batch.step_inputs import StepInputs
from engine.devices.cuda.adapters import AdaptedProduct
from engine.devices.cuda.attention import backend
from engine.devices.cuda.decoder import Added, CudaDecoder, Made
from engine.devices.cuda.experts import RoutedTiles, Router, add_up, routes_of
from engine.devices.cuda.fp8_products import rounded
from engine.devices.cuda.latents import attend_latents
from engine.devices.cuda.products import TiledLinear
from engine.devices.cuda.recurrent import mixers, operators
from engine.devices.torch import transformers_hook
from engine.devices.torch.latent_attention import Absorbed
from engine.kv.attention import AttentionMetadata, AttentionOptions, LayerKv
from engine.kv.layout import Segment
from engine.kv.row_codes import KvRows, StoredRows
from engine.kv.state_slots import RecurrentLayer, RowSpan, StateLayout, StateSlots
from engine.lora.files import LinearShape
from engine.lora.table import Adapters
from engine.model.describe import describe
from engine.model.program import (
    Activation,
    Experts,
    LatentAttention,
    MixerKind,
    Norm,
    NormKind,
    Product,
    Recurrent,
    Score,
    TokenVectors,
)
from engine.quantization.weight import CodeFormat, QuantizedWeight
from engine.sampler.rows import EditLists
from engine.sampler.triton_kernel.chooser import Chosen, TritonSampler, choose
from speculation.tree_growth import TREE_WIDTH, TreeGrowth
from speculation.verification.on_device import stops_of
from tests.engine import launches as decode_launches
from tests.engine.devices.expert_memory import EXPERT_MODELS, dense_bytes, weight_bytes
from tests.engine.triton_offline import DEVICES, Code, launches

DOCUMENT = Path(__file__).parents[2] / "docs" / "gpu.md"


@dataclass(frozen=True)
class Variant:
    """A kind of layer, and the number of rows of each of four sequences."""

    num_rows: int
    heads: int = 32
    kv_heads: int = 8
    dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.bfloat16
    quantization: str = "none"
    trees: bool = False
    window: int | None = None
    sinks: bool = False


VARIANTS = {
    "bf16, rows to verify": Variant(8),
    "bf16, trees": Variant(8, trees=True),
    "bf16, chunk": Variant(512),
    "fp32, rows to verify": Variant(8, dtype=torch.float32),
    "fp8 KV, rows to verify": Variant(8, quantization="fp8_row_scales"),
    "int8 KV, rows to verify": Variant(8, quantization="int8_row_scales"),
    "gpt-oss (head 64, window, sinks), rows to verify": Variant(8, 64, 8, (64, 64), window=128, sinks=True),
}


PRODUCTS = {
    "bf16": (None, 4096, False),
    "int8": (CodeFormat.INT8, 4096, False),
    "int4, groups of 128, zero points": (CodeFormat.INT4, 128, True),
    "int4, groups of 32": (CodeFormat.INT4, 32, False),
    "fp8, groups of 128": (CodeFormat.FP8, 128, False),
    "mxfp4": (CodeFormat.MXFP4, 32, False),
}
"""The format, the number of inputs that share a scale, and whether there are zero points."""

PRODUCT_ROWS = {f"{name}, {rows} rows": (name, rows) for name in PRODUCTS for rows in (8, 512)}

ROUNDED_INPUTS = {
    "inputs rounded to fp8, a scale a row": 1,
    "inputs rounded to fp8, a scale for 128 values": 32,
}
"""The number of scales of a row."""

EXPERTS = {
    "router, and rows of each expert": ("route", None, 64),
    "DeepSeek-V3: router, and rows of each expert": ("route", None, 64),
    "rows of each expert": ("assign", CodeFormat.MXFP4, 64),
    "mxfp4 experts, 64 rows": ("multiply", CodeFormat.MXFP4, 64),
    "mxfp4 experts, 2048 rows": ("multiply", CodeFormat.MXFP4, 2048),
    "bf16 experts, 64 rows": ("multiply", None, 64),
    "bf16 experts, 2048 rows": ("multiply", None, 2048),
    "mxfp4 experts, 64 rows, activated before": ("multiply", CodeFormat.MXFP4, 64),
    "mxfp4 experts, 2048 rows, activated before": ("multiply", CodeFormat.MXFP4, 2048),
    "bf16 experts, 64 rows, activated before": ("multiply", None, 64),
    "bf16 experts, 2048 rows, activated before": ("multiply", None, 2048),
    "sum of a row's experts": ("combine", CodeFormat.MXFP4, 64),
}
"""The kernel's name, the format of the weights, and the number of rows."""

DECODER_KERNELS = {
    "norm with residual": ("add_norm", "none"),
    "norm with residual and sum of experts": ("add_norm", "none"),
    "head norms, rotary embedding, KV write": ("rotate", "none"),
    "head norms, rotary embedding, KV write in fp8": ("rotate", "fp8_row_scales"),
    "gated activation": ("gate", "none"),
    "vectors of tokens": ("token_vectors", "none"),
}
"""The kernel's name, and how KV is quantized."""


SAMPLER_KERNELS = {
    "top logits": ("scan", False),
    "top logits, with edits": ("scan", True),
    "filters and choice": ("sift", False),
    "draft probabilities": ("weigh", False),
}
"""The kernel's name, and whether the logits are edited."""

VERIFICATION_KERNELS = {
    "filters and choice, keeping probabilities": ("sift", 0),
    "standard: acceptance and draw": ("recover", 0),
    "block: acceptance and draw": ("recover", 6),
}
"""The kernel's name, and how many chain lengths block verification may see."""

TREE_KERNELS = {
    "a round of growth": "grow",
    "the last round": "end",
    "rows of a step's inputs": "lay_out",
    "hidden states of parents": "follow",
}
"""The kernel's name."""


ADAPTERS = {
    f"{what}, rank {rank}": (kernel, rank)
    for rank in (16, 64)
    for what, kernel in (("shrink", "shrink"), ("expand and add", "expand"))
}
"""The kernel's name, and the highest rank."""


LATENTS = {
    "DeepSeek-V3: latent, rotated key and normed query vector": ("keep_latents", 0),
    "DeepSeek-V3: heads' queries for latents": ("multiply_heads", 0),
    "DeepSeek-V3: heads' values from latents": ("multiply_heads", 1),
}
"""The kernel's name, and its number among those of that name."""


RECURRENT = {
    "LFM2: convolution": ("convolve", 2048, (32, 16, 128, 128), 1, True),
    "Qwen3.5: convolution, unit queries and keys, gates": ("prepare", 8192, (32, 16, 128, 128), 1, True),
    "Qwen3.5: gated delta rule": ("attend", 8192, (32, 16, 128, 128), 1, True),
    "Qwen3.5: norm and output gates, window update": ("gate_heads", 8192, (32, 16, 128, 128), 1, True),
    "window update alone": ("keep", 8192, (32, 16, 128, 128), 1, True),
    "Kimi Linear: delta rule with channel decays": ("attend", 12288, (32, 32, 128, 128), 128, True),
    "Nemotron-H, Falcon-H1: convolution, time steps": ("prepare", 10240, (128, 8, 128, 64), 1, False),
    "Nemotron-H, Falcon-H1: Mamba2": ("attend", 10240, (128, 8, 128, 64), 1, False),
    "Nemotron-H, Falcon-H1: gates and norm, window update": (
        "gate_states",
        10240,
        (128, 8, 128, 64),
        1,
        False,
    ),
    "Jamba: selective scan": ("scan", 8192, (8192, 1, 16, 1), 1, False),
}
"""The kernel's name; the channels; (heads, key heads, key dimension, value dimension); the decay's dimension;
and whether the delta rule applies.
"""


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def stored(rows: KvRows, heads: int, dim: int, block_size: int = 16) -> StoredRows:
    """Return the views of a layer's keys or values in a pool of two layers."""
    segment = Segment(2, heads, dim, rows.dtype, num_planes=1, quantization=rows.quantization)
    blocks = meta(64, segment.block_bytes(block_size), dtype=torch.uint8)
    return segment.views(blocks, block_size).part(slice(None), 1, 0)


def four_decode_rows() -> AttentionMetadata:
    return AttentionMetadata(
        query_start=meta(5),
        context_len=meta(4),
        block_table=meta(4, 4),
        slot_mapping=meta(4, dtype=torch.int64),
        max_query_len=1,
        max_context_len=64,
    )


def token_vectors(hidden: int, layers: int, size: int) -> TokenVectors:
    """Return the vectors of a vocabulary of 512 tokens for each layer, as Gemma 4 has them."""
    halves: Any = {"device": "meta", "dtype": torch.bfloat16}
    product = Product((torch.nn.Linear(hidden, layers * size, bias=False, **halves),))
    norm = Norm(torch.empty(size, **halves), 1e-6, NormKind.EXACT)
    return TokenVectors(torch.empty(512, layers * size, **halves), size**0.5, product, hidden**-0.5, norm)


def compiled_between(name: str, capability: int) -> Code:
    """Compile a kernel of the decoder."""
    kernel_name, quantization = DECODER_KERNELS[name]
    config = Qwen3Config(
        num_hidden_layers=1,
        hidden_size=4096,
        intermediate_size=12288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=512,
    )
    transformers_hook.register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=transformers_hook.NAME
        )
    rows = KvRows(torch.bfloat16, quantization)
    layer = LayerKv.of_sides(*(stored(rows, 8, 128) for _ in range(2)))
    metadata = four_decode_rows()
    inputs = inputs_of(4, metadata)
    with torch.inference_mode(), launches(capability) as kernels:
        attention = backend.TritonBackend([layer], rows=rows)
        attention.begin_step(metadata)
        program = describe(model)
        if kernel_name == "token_vectors":
            program = replace(program, token_vectors=token_vectors(4096, 35, 256))
        decoder = CudaDecoder(program, attention, 64)
        if "experts" in name:
            kernels.clear()
            made = Made(meta(32, 4096, dtype=torch.bfloat16), meta(4, 8, dtype=torch.bfloat16))
            residual = meta(4, 4096, dtype=torch.bfloat16)
            decoder._add_norm(Added(made, None), residual, program.final_norm)
        else:
            decoder.forward(inputs)
    return Code.of([kernel for kernel in kernels if kernel.name == kernel_name][-1])


def compiled_sampling(name: str, capability: int) -> Code:
    """Compile a kernel of the sampler."""
    kernel_name, edited = SAMPLER_KERNELS[name]
    edits = None
    if edited:
        edits = EditLists(
            meta(4, 5),
            meta(64),
            meta(64, dtype=torch.float32),
            meta(4, 3, dtype=torch.float32),
            meta(4),
            meta(4, 4748),
        )
    count = 4
    with launches(capability) as kernels:
        chosen = chosen_of(count, torch.float32 if edited else torch.bfloat16)
        choose(
            meta(count, 151936, dtype=torch.bfloat16),
            meta(3, count, dtype=torch.int64),
            edits,
            chosen,
            is_greedy=False,
            keeps=False,
        )
        TritonSampler.shares(chosen)
    return Code.of(next(kernel for kernel in kernels if kernel.name == kernel_name))


def chosen_of(count: int, dtype: torch.dtype = torch.bfloat16) -> Chosen:
    return Chosen(
        meta(count, dtype=torch.int64),
        meta(count, 151936, dtype=dtype),
        meta(3, count, dtype=torch.float64),
        meta(count, 3, dtype=torch.float64),
        meta(count),
    )


def compiled_verification(name: str, capability: int) -> Code:
    kernel_name, lengths = VERIFICATION_KERNELS[name]
    chosen = chosen_of(24)
    with launches(capability) as kernels:
        if kernel_name == "sift":
            choose(chosen.logits, meta(3, 24, dtype=torch.int64), None, chosen, is_greedy=False, keeps=True)
        else:
            stops_of(meta(4, 7, dtype=torch.int64), meta(20, 2, dtype=torch.int64), chosen, lengths)
    return Code.of(next(kernel for kernel in kernels if kernel.name == kernel_name))


def compiled_trees(name: str, capability: int) -> Code:
    def upload(arrays: Sequence[np.ndarray]) -> list[Tensor]:
        return [meta(*array.shape, dtype=torch.int64) for array in arrays]

    with torch.inference_mode(), launches(capability) as kernels:
        growth = TreeGrowth([24] * 4, TREE_WIDTH, 16, upload, by_kernels=True)
        level = growth.grow(meta(4, 4, dtype=torch.float32), meta(4, 4, dtype=torch.int64))
        level.before(meta(4, 4096, dtype=torch.bfloat16))
        level.fill(tree_inputs(16))
        growth.end(meta(16, 4, dtype=torch.float32), meta(16, 4, dtype=torch.int64))
    return Code.of(next(kernel for kernel in kernels if kernel.name == TREE_KERNELS[name]))


def tree_inputs(count: int) -> StepInputs:
    """Return the inputs of four trees with `count` rows together."""
    metadata = AttentionMetadata(
        query_start=meta(5),
        context_len=meta(4),
        block_table=meta(4, 8),
        slot_mapping=meta(count, dtype=torch.int64),
        max_query_len=4,
        max_context_len=128,
        visible=meta(count, dtype=torch.int64),
        tree_start=meta(4),
    )
    return inputs_of(count, metadata)


def inputs_of(count: int, metadata: AttentionMetadata) -> StepInputs:
    """Return the inputs of `count` rows."""
    token_ids, positions, logit_rows = (meta(count, dtype=torch.int64) for _ in range(3))
    return StepInputs(token_ids, positions, logit_rows, metadata)


def compiled_adapters(name: str, capability: int) -> Code:
    """Compile an adapter kernel for a product with 4096 inputs and three parts."""
    kernel_name, rank = ADAPTERS[name]
    device, dtype = torch.device("meta"), torch.bfloat16
    linears = {path: LinearShape(size, 4096) for path, size in (("q", 4096), ("k", 1024), ("v", 1024))}
    product = AdaptedProduct.of([*linears], Adapters(linears, device, dtype, rank))
    with launches(capability) as kernels:
        product.add(meta(8, 6144, dtype=dtype), meta(8, 4096, dtype=dtype), meta(8, dtype=torch.int64))
    return Code.of(next(kernel for kernel in kernels if kernel.name == kernel_name))


def compiled_latents(name: str, capability: int) -> Code:
    """Compile a kernel of latent attention, for 64 rows and 128 heads."""
    kernel_name, number = LATENTS[name]
    halves = {"dtype": torch.bfloat16}
    keys = stored(KvRows(torch.bfloat16, "none"), 1, 576).values
    metadata = four_decode_rows()
    inputs = inputs_of(64, metadata)
    absorbed = Absorbed(meta(128 * 256, 512, **halves), 128, 128)
    norms = [Norm(meta(size, **halves), 1e-6) for size in (1536, 512)]
    mixer = LatentAttention(
        inputs=Product(()),
        output=Product(()),
        layer=0,
        heads=128,
        head_dim=192,
        scale=0.1,
        queries=lambda low: meta(64, 128 * 192, **halves),
        query_norm=norms[0],
        key_norm=norms[1],
        to_latent=absorbed.to_latent,
        to_value=absorbed.to_value,
        in_pairs=True,
    )
    with torch.inference_mode(), launches(capability) as kernels:
        attention = backend.TritonBackend([LayerKv(keys, keys[..., :512])])
        attention.begin_step(metadata)
        turns = meta(4096, 64, **halves), meta(4096, 64, **halves)
        made = meta(64, 1536 + 576, **halves)
        attend_latents(mixer, made, inputs, attention, metadata.slot_mapping, turns)
    return Code.of([kernel for kernel in kernels if kernel.name == kernel_name][number])


def compiled_recurrent(name: str, capability: int) -> Code:
    kernel_name, channels, (heads, key_heads, key_dim, value_dim), decay_dim, has_delta = RECURRENT[name]
    layer = RecurrentLayer(channels, 4, heads, key_heads, key_dim, value_dim, decay_dim)
    state_slots = StateSlots(StateLayout((layer,), torch.bfloat16).with_drafts(16), 4, torch.device("meta"))
    floats, halves = {"dtype": torch.float32}, {"dtype": torch.bfloat16}
    with pytest.MonkeyPatch.context() as patch, launches(capability) as kernels:
        patch.setattr(operators, "upload_to", lambda device: lambda arrays: [meta(*a.shape) for a in arrays])
        recurrent = operators.TritonOperators(state_slots)
        recurrent.begin_step([RowSpan(state_slot, 5, 3, 6) for state_slot in range(4)])
        if kernel_name == "convolve":
            inputs, weight = meta(12, channels, **halves), meta(channels, 4, **halves)
            recurrent.causal_conv(0, inputs, weight, None)
        elif kernel_name == "scan":
            query, key, value, times = (meta(12, n, **floats) for n in (key_dim, key_dim, heads, heads))
            recurrent.selective_scan(0, query, key, value, times, meta(heads, key_dim, **floats))
        elif kernel_name == "keep":
            sizes = (
                (key_heads, key_dim),
                (key_heads, key_dim),
                (heads, value_dim),
                (heads, decay_dim),
                (heads,),
            )
            recurrent.linear_attention(0, *(meta(12, *size, **floats) for size in sizes))
        else:
            width = heads * value_dim
            mixer = Recurrent(
                kind=MixerKind.DELTA if has_delta else MixerKind.STATE_SPACE,
                inputs=Product(()),
                output=Product(()),
                number=0,
                taps=meta(channels, 4, **halves),
                bias=None,
                rates=meta(heads, **floats),
                shifts=meta(heads * decay_dim, **floats),
                skips=meta(heads, **halves),
                norm=Norm(meta(value_dim if has_delta else width, **halves), 1e-6),
                group=width // key_heads,
            )
            made = meta(12, channels + width + (0 if has_delta else heads), **halves)
            if has_delta:
                mixers.apply_delta_rule(recurrent, mixer, made, meta(12, heads * (1 + decay_dim), **halves))
            else:
                mixers.scan_states(recurrent, mixer, made)
    return Code.of(next(kernel for kernel in kernels if kernel.name == kernel_name))


def compiled_attention(name: str, capability: int) -> Code:
    """Compile the attention kernel for the variant's rows."""
    variant = VARIANTS[name]
    rows = KvRows(variant.dtype, variant.quantization)
    size, context, sequences = 16, 4096, 4
    total = sequences * variant.num_rows
    layer = LayerKv.of_sides(*(stored(rows, variant.kv_heads, dim, size) for dim in variant.dims))
    metadata = AttentionMetadata(
        query_start=meta(sequences + 1),
        context_len=meta(sequences),
        block_table=meta(sequences, context // size),
        slot_mapping=meta(total, dtype=torch.int64),
        max_query_len=variant.num_rows,
        max_context_len=context,
        visible=meta(total, dtype=torch.int64) if variant.trees else None,
        tree_start=meta(sequences) if variant.trees else None,
    )
    new = [
        meta(total, heads, dim, dtype=variant.dtype)
        for heads, dim in zip(
            (variant.heads, variant.kv_heads, variant.kv_heads), (variant.dims[0], *variant.dims), strict=True
        )
    ]
    with launches(capability) as kernels:
        attention: Any = backend.TritonBackend([layer], rows=rows)
        attention.begin_step(metadata)
        sinks = meta(variant.heads, dtype=variant.dtype) if variant.sinks else None
        options = AttentionOptions(0.1, variant.window or 0, 0.0, sinks)
        attention.forward(0, *new, options)
    return Code.of([kernel for kernel in kernels if kernel.name == "attend"][-1])


def compiled_product(name: str, capability: int) -> Code:
    """Compile a product with a weight of 4096 inputs and outputs."""
    name, rows = PRODUCT_ROWS[name]
    format, group, has_zeros = PRODUCTS[name]
    if format is None:
        tiled = TiledLinear.plain(meta(4096, 4096, dtype=torch.bfloat16), None)
    else:
        groups = meta(4096, 4096 // group, dtype=torch.float32)
        codes = meta(4096, 4096, dtype=torch.uint8)
        weight = QuantizedWeight(format, codes, groups, groups if has_zeros else None)
        tiled = TiledLinear.quantized(weight, None)
    with launches(capability) as kernels:
        tiled(meta(rows, 4096, dtype=torch.bfloat16))
    return Code.of(kernels[-1])


def compiled_rounding(name: str, capability: int) -> Code:
    """Compile the rounding of 8 rows of 4096 inputs."""
    with launches(capability) as kernels:
        rounded(meta(8, 4096, dtype=torch.bfloat16), ROUNDED_INPUTS[name])
    return Code.of(kernels[-1])


def router_of(name: str) -> Router:
    """Return the router of DeepSeek-V3, or of Qwen3-30B-A3B."""
    halves, is_deepseek = {"dtype": torch.bfloat16}, name.startswith("DeepSeek")
    experts = Experts(
        holder=None,
        router=meta(256, 7168, **halves) if is_deepseek else meta(128, 2048, **halves),
        router_bias=None,
        chosen=8,
        score=Score.SIGMOID if is_deepseek else Score.SOFTMAX,
        preferences=meta(256, dtype=torch.float32) if is_deepseek else None,
        groups=8 if is_deepseek else 1,
        open_groups=4 if is_deepseek else 1,
        normalizes=True,
        least_sum=1e-20 if is_deepseek else 0.0,
        scaling=2.5 if is_deepseek else 1.0,
        is_exact=is_deepseek,
        rounds=not is_deepseek,
        shared_gate=None,
        activation=Activation.SILU,
        is_gated=True,
    )
    return Router.of(experts, shared=is_deepseek)


def experts_of(shape: tuple[int, int, int], format: CodeFormat | None) -> RoutedTiles:
    """Return weights [experts, outputs, inputs] in MXFP4 with biases, or in bf16."""
    if format is None:
        return RoutedTiles.plain(meta(*shape, dtype=torch.bfloat16), None)
    codes, scales = meta(*shape[:2], shape[2] // 2), meta(*shape[:2], shape[2] // 32)
    codes, scales, bias = codes.to(torch.uint8), scales.to(torch.uint8), meta(*shape[:2])
    return RoutedTiles(format, 32, weight=codes, scales=scales, bias=bias)


def compiled_experts(name: str, capability: int) -> Code:
    """Compile a kernel of the first product of a layer's experts, or of the second, which activates."""
    kernel_name, format, rows = EXPERTS[name]
    is_mxfp4 = format is CodeFormat.MXFP4
    shape, chosen = ((128, 5760, 2880), 4) if is_mxfp4 else ((128, 1536, 2048), 8)
    tiled = experts_of(shape, format)
    with launches(capability) as kernels:
        router = router_of(name)
        router.routes(meta(rows, router.weight.shape[1], dtype=torch.bfloat16))
        hidden = meta(rows, shape[2], dtype=torch.bfloat16)
        routes = routes_of(meta(rows, chosen, dtype=torch.int64), shape[0])
        made = tiled(hidden, routes)
        if "activated" in name:
            kernels.clear()
            gate = Activation.CLAMPED_SWIGLU if is_mxfp4 else Activation.SILU
            tiled = experts_of((shape[0], shape[2], shape[1] // 2), format)
            made = tiled(meta(rows * chosen, shape[1], dtype=torch.bfloat16), routes, gate)
        add_up(made, meta(rows, chosen, dtype=torch.bfloat16))
    return Code.of(next(kernel for kernel in kernels if kernel.name == kernel_name))


def cell(name: str, capability: int) -> str:
    """Return the table's figures of a kernel on a GPU. Raises `ValueError` if the kernel spills registers."""
    device, code = DEVICES[capability], code_of(name, capability)
    if code.spills:
        raise ValueError(f"{name} spills registers on {device.name}")
    shared = f"{code.shared_bytes / 1024:.0f}"
    return " / ".join(
        map(str, (code.registers, shared, code.wide_copies, code.products, device.programs(code)))
    )


def row(name: str) -> str:
    return f"| {name} | {' | '.join(cell(name, capability) for capability in DEVICES)} |"


def memory() -> str:
    """Return the weight memory of two models with experts."""
    sizes = {name: (sum(weight_bytes(name).values()), dense_bytes(name)) for name in EXPERT_MODELS}
    each = (
        f"{name} {size / 1e9:.1f} GB, {dense / 1e9:.1f} GB in bf16"
        for name, (size, dense) in sizes.items()
        if size != dense
    )
    return "; ".join(each)


SECTIONS: tuple[tuple[Mapping[str, object], Callable[[str, int], Code]], ...] = (
    (VARIANTS, compiled_attention),
    (DECODER_KERNELS, compiled_between),
    (SAMPLER_KERNELS, compiled_sampling),
    (VERIFICATION_KERNELS, compiled_verification),
    (TREE_KERNELS, compiled_trees),
    (PRODUCT_ROWS, compiled_product),
    (ROUNDED_INPUTS, compiled_rounding),
    (EXPERTS, compiled_experts),
    (ADAPTERS, compiled_adapters),
    (LATENTS, compiled_latents),
    (RECURRENT, compiled_recurrent),
)
"""The kernels of each table, and the function that compiles them."""


def code_of(name: str, capability: int) -> Code:
    compiled = next(compiled for names, compiled in SECTIONS if name in names)
    return compiled(name, capability)


def document(text: str) -> str:
    """Return the page's text with the tables as the kernels are now."""
    kernels = {name for names, _ in SECTIONS for name in names}
    lines = []
    for line in text.splitlines():
        name = line.strip("| ").split(" |")[0]
        if line.startswith("| ") and name in kernels:
            line = row(name)
        elif line.startswith("| ") and name in decode_launches.FAMILIES:
            line = decode_launches.row(name)
        elif line.startswith("Weights in memory: "):
            line = f"Weights in memory: {memory()}."
        lines.append(re.sub(r"(?<=with Triton )[\d.]+(?=;)", triton.__version__, line))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
