"""Quantization on the wire costs little accuracy, measured on the bundled model's KV of held-out Python code.

`pytest tests/statistics/test_kv_wire_accuracy.py -s` prints the figures; `bench.transfer.accuracy` says what
is measured. In bfloat16 many logits tie or differ by their last bit, so any change may turn such a decision.
The smallest possible change, dropping the last bit of every KV value, shows how often.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Literal
from unittest import mock

import numpy as np
import pytest
import torch

from bench.transfer import accuracy
from bench.transfer.accuracy import NEW_TOKENS, Agreement, Continuation, Handoffs, agreement
from engine.engine import Engine
from kvtransfer.blocks.convert import Quantizer
from kvtransfer.blocks.layout import BlockLayout, block_bytes
from protocol.config import ServeConfig

Dtype = Literal["float32", "bfloat16"]
NUM_VALUES = 4 * 2 * 16 * 2 * 64
"""The number of values in a block of the bundled model."""


def native_engine(config: ServeConfig) -> Engine:
    return Engine(replace(config, compile="auto"))


@functools.cache
def handoffs(dtype: Dtype) -> Handoffs:
    with mock.patch.object(accuracy, "Engine", native_engine):
        return Handoffs(dtype)


@functools.cache
def through_the_wire(dtype: Dtype, wire_dtype: str) -> tuple[list[bytearray], Agreement]:
    """Return the prompts' blocks after the wire, and how far greedy decoding agreed."""
    model = handoffs(dtype)
    blocks = [model.through_the_wire(prompt, wire_dtype) for prompt in model.prompts]
    return blocks, agreement(model.unchanged, model.continue_with(blocks))


def relative_error(model: Handoffs, blocks: list[bytearray]) -> list[float]:
    """Return the root mean square error of K and of V, divided by the root mean square of the values."""
    layout = BlockLayout(model.segments)
    error, power = torch.zeros(2), torch.zeros(2)
    for prompt, content in zip(model.prompts, blocks, strict=True):
        before, after = (
            layout.segments[0].values(layout.blocks(memoryview(buffer))).float()
            for buffer in (prompt.blocks, content)
        )
        planes = before.movedim(1, 0).unflatten(0, (-1, 2)).flatten(2, 3)[:, :, : len(prompt.token_ids)]
        got = after.movedim(1, 0).unflatten(0, (-1, 2)).flatten(2, 3)[:, :, : len(prompt.token_ids)]
        error += (got - planes).pow(2).sum((0, 2, 3, 4))
        power += planes.pow(2).sum((0, 2, 3, 4))
    return (error / power).sqrt().tolist()


def told(agreed: Agreement) -> str:
    median, largest = (np.median(agreed.margins), agreed.margins.max()) if len(agreed.margins) else (0, 0)
    return (
        f"{agreed.continuations:.3f} of the continuations of {NEW_TOKENS} tokens agree, "
        f"{agreed.decisions:.5f} of the decisions; "
        f"margin of the others: median {median:.3f}, largest {largest:.3f}"
    )


def without_last_bit(blocks: bytearray) -> bytearray:
    """Round bfloat16 values to one bit less, upwards if halfway."""
    bits = torch.frombuffer(bytearray(blocks), dtype=torch.int16)
    return bytearray(((bits + 1) & ~1).view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "most_error", "continuations", "decisions", "largest_margin"),
    [
        ("float32", "int8", 0.01, 0.9, 0.998, 0.1),
        ("bfloat16", "int8", 0.01, 0.75, 0.995, 0.2),
        ("bfloat16", "fp8", 0.03, 0.6, 0.99, 0.6),
    ],
)
def test_greedy_decoding_agrees_with_decoding_without_the_wire(
    dtype: Dtype,
    wire_dtype: str,
    most_error: float,
    continuations: float,
    decisions: float,
    largest_margin: float,
) -> None:
    model = handoffs(dtype)
    assert len(model.prompts) >= 50
    blocks, agreed = through_the_wire(dtype, wire_dtype)
    errors = relative_error(model, blocks)
    share = block_bytes(Quantizer(model.segments, wire_dtype).wire) / (NUM_VALUES * 2)
    print(
        f"\n{wire_dtype} of {dtype}: {share:.4f} of the bytes of bfloat16; relative RMS error of "
        f"K {errors[0]:.4f}, of V {errors[1]:.4f}; {told(agreed)}"
    )
    assert share <= 0.53
    assert max(errors) < most_error
    assert agreed.continuations >= continuations
    assert agreed.decisions >= decisions
    assert agreed.margins.max(initial=0) <= largest_margin


def test_int8_changes_little_more_than_dropping_the_last_bit() -> None:
    model = handoffs("bfloat16")
    _, of_int8 = through_the_wire("bfloat16", "int8")
    one_bit = [without_last_bit(prompt.blocks) for prompt in model.prompts]
    of_one_bit = agreement(model.unchanged, model.continue_with(one_bit))
    print(f"\nbfloat16 without its last bit: {told(of_one_bit)}")
    assert of_int8.continuations > of_one_bit.continuations - 0.1


def test_agreement_counts_decisions_up_to_the_first_different_one() -> None:
    same = Continuation([1] * NEW_TOKENS, [0.5] * NEW_TOKENS)
    other = Continuation([1] * 9 + [2, 1] + [3] * (NEW_TOKENS - 11), [0.1] * NEW_TOKENS)
    agreed = agreement([same, same], [same, other])
    assert agreed.continuations == 0.5
    assert agreed.decisions == 1 - 1 / (NEW_TOKENS + 10)
    assert agreed.margins.tolist() == [0.5]
