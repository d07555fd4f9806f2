"""What quantization on the wire costs in accuracy, on the bundled model's own KV of held-out Python code.

`pytest tests/statistics/test_kv_wire_accuracy.py -s` prints the figures. A greedy continuation is a chain of
decisions, and once one of them falls differently the rest says little, so three things are measured: whole
continuations that agree, decisions that agree (up to and with the first different one), and by how much the
model preferred its token where a decision fell differently. In bfloat16 many of its logits tie, or differ by
their last bit; such a decision may turn with any change at all. How often is measured by a change as small as
bfloat16 has: the last bit of every value of the KV.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from engine.engine import Engine
from kvtransfer.convert import Converter
from kvtransfer.layout import BlockLayout, block_bytes, tokens_in_blocks
from kvtransfer.quantize import Quantizer
from protocol.config import ServeConfig
from protocol.messages import EngineRequest
from protocol.sampling import SamplingParams

MODELS = Path(__file__).parents[2] / "models"
MODEL = MODELS / "tandem-code-10m"
NEW_TOKENS = 64
NUM_VALUES = 4 * 2 * 16 * 2 * 64
"""In a block of the bundled model."""


@dataclass
class Prefilled:
    """A prompt, its blocks as they lie in the pool, and the first token after it."""

    token_ids: list[int]
    blocks: bytearray
    first_token: int

    @property
    def positions(self) -> np.ndarray:
        return np.arange(-(-len(self.token_ids) // 16))


@dataclass
class Continuation:
    """Tokens, and by how much (in nats) each was likelier than the next best."""

    token_ids: list[int]
    margins: list[float]


class Handoffs:
    """The bundled model, whose prompts' KV goes through the wire's format and back before decoding."""

    def __init__(self, dtype: str) -> None:
        config = ServeConfig(
            model=str(MODEL),
            dtype=dtype,
            device="cpu",
            compile="off",
            enable_prefix_caching=False,
            kv_cache_memory_bytes=512 * 1024 * 1024,
            log_level="warning",
        )
        self.engine = Engine(config)
        self.segments = self.engine.pool.segments
        self.pool = memoryview(self.engine.pool.tensor.flatten().view(torch.uint8).numpy())
        self.block_bytes = block_bytes(self.segments)
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        lines = (MODELS / "heldout_prompts.jsonl").read_text("utf-8").splitlines()
        prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
        self.prompts = [self.prefill(f"prefill-{index}", ids) for index, ids in enumerate(prompts)]
        self.unchanged = self.continue_with([prompt.blocks for prompt in self.prompts])

    def request(self, request_id: str, token_ids: list[int]) -> EngineRequest:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
        return EngineRequest(request_id=request_id, prompt_token_ids=token_ids, sampling=sampling)

    def prefill(self, request_id: str, token_ids: list[int]) -> Prefilled:
        self.engine.add(self.request(request_id, token_ids), prefill_only=True)
        tokens: list[int] = []
        while not tokens:
            tokens = [token for output in self.engine.step().outputs for token in output.token_ids]
        ids = self.engine.block_ids(request_id)[: -(-len(token_ids) // 16)]
        size = self.block_bytes
        blocks = bytearray().join(self.pool[block * size : (block + 1) * size] for block in ids)
        self.engine.release(request_id)
        return Prefilled(token_ids, blocks, tokens[0])

    def continue_with(self, blocks: list[bytearray]) -> list[Continuation]:
        """The greedy continuation of each prompt if these are its blocks."""
        continuations: dict[str, Continuation] = {}
        for index, (prompt, content) in enumerate(zip(self.prompts, blocks, strict=True)):
            name = f"decode-{index}"
            reservation = self.engine.reserve(self.request(name, prompt.token_ids))
            assert reservation is not None and reservation.cached_blocks == 0
            size = self.block_bytes
            for position, block in enumerate(reservation.block_ids):
                self.pool[block * size : (block + 1) * size] = content[
                    position * size : (position + 1) * size
                ]
            self.engine.activate(name, prompt.first_token)
            continuations[name] = Continuation([prompt.first_token], [math.inf])
        while self.engine.has_work():
            for output in self.engine.step().outputs:
                continuations[output.request_id].token_ids.extend(output.token_ids)
                margins = [np.subtract(*each.top_logprobs) for each in output.logprobs or []]
                continuations[output.request_id].margins.extend(margins)
        return list(continuations.values())

    def through_the_wire(self, prompt: Prefilled, wire_dtype: str) -> bytearray:
        quantizer = Quantizer(self.segments, wire_dtype)
        wire = bytearray(len(prompt.positions) * quantizer.wire_block_bytes)
        num_tokens = tokens_in_blocks(prompt.positions, 16, len(prompt.token_ids))
        quantizer.pack(memoryview(prompt.blocks), prompt.positions, num_tokens, memoryview(wire))
        back = bytearray(len(prompt.blocks))
        converter = Converter(quantizer.wire, self.segments, memoryview(back))
        converter.place(memoryview(wire), prompt.positions, prompt.positions, 0, len(prompt.token_ids))
        return back

    def relative_error(self, blocks: list[bytearray]) -> list[float]:
        """Root mean square of the error of K and of V, over that of the values."""
        layout = BlockLayout(self.segments)
        error, power = torch.zeros(2), torch.zeros(2)
        for prompt, content in zip(self.prompts, blocks, strict=True):
            before, after = (
                layout.segments[0].values(layout.blocks(memoryview(buffer))).float()
                for buffer in (prompt.blocks, content)
            )
            planes = before.movedim(1, 0).unflatten(0, (-1, 2)).flatten(2, 3)[:, :, : len(prompt.token_ids)]
            got = after.movedim(1, 0).unflatten(0, (-1, 2)).flatten(2, 3)[:, :, : len(prompt.token_ids)]
            error += (got - planes).pow(2).sum((0, 2, 3, 4))
            power += planes.pow(2).sum((0, 2, 3, 4))
        return (error / power).sqrt().tolist()


@functools.cache
def handoffs(dtype: str) -> Handoffs:
    return Handoffs(dtype)


@dataclass
class Agreement:
    """Shares of whole continuations and of decisions; the margins of the decisions that fell differently."""

    continuations: float
    decisions: float
    margins: np.ndarray

    def __str__(self) -> str:
        median, largest = (np.median(self.margins), self.margins.max()) if len(self.margins) else (0, 0)
        return (
            f"{self.continuations:.3f} of the continuations of {NEW_TOKENS} tokens agree, "
            f"{self.decisions:.5f} of the decisions; "
            f"margin of the others: median {median:.3f}, largest {largest:.3f}"
        )


def agreement(reference: list[Continuation], other: list[Continuation]) -> Agreement:
    margins, decisions = [], 0
    for expected, got in zip(reference, other, strict=True):
        assert len(expected.token_ids) == len(expected.margins) == len(got.token_ids) == NEW_TOKENS
        differing = np.flatnonzero(np.array(expected.token_ids) != np.array(got.token_ids))
        decisions += differing[0] + 1 if len(differing) else NEW_TOKENS
        margins.extend(expected.margins[first] for first in differing[:1])
    count = len(reference)
    return Agreement((count - len(margins)) / count, 1 - len(margins) / decisions, np.array(margins))


def without_last_bit(blocks: bytearray) -> bytearray:
    """bfloat16 values rounded to one bit less (up if halfway)."""
    bits = torch.frombuffer(bytearray(blocks), dtype=torch.int16)
    return bytearray(((bits + 1) & ~1).view(torch.uint8).numpy().tobytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "most_error", "continuations", "decisions", "largest_margin"),
    [
        ("float32", "int8", 0.01, 0.9, 0.998, 0.1),
        ("bfloat16", "int8", 0.01, 0.75, 0.995, 0.2),
        ("bfloat16", "fp8", 0.03, 0.6, 0.99, 0.6),
    ],
)
def test_greedy_decoding_goes_on_as_without_the_wire(
    dtype: str,
    wire_dtype: str,
    most_error: float,
    continuations: float,
    decisions: float,
    largest_margin: float,
) -> None:
    model = handoffs(dtype)
    assert len(model.prompts) >= 50
    blocks = [model.through_the_wire(prompt, wire_dtype) for prompt in model.prompts]
    errors = model.relative_error(blocks)
    agreed = agreement(model.unchanged, model.continue_with(blocks))
    share = block_bytes(Quantizer(model.segments, wire_dtype).wire) / (NUM_VALUES * 2)
    print(
        f"\n{wire_dtype} of {dtype}: {share:.4f} of the bytes of bfloat16; relative RMS error of "
        f"K {errors[0]:.4f}, of V {errors[1]:.4f}; {agreed}"
    )
    assert share <= 0.53
    assert max(errors) < most_error
    assert agreed.continuations >= continuations
    assert agreed.decisions >= decisions
    assert agreed.margins.max(initial=0) <= largest_margin


@pytest.mark.slow
def test_int8_costs_bfloat16_hardly_more_than_the_last_bit_of_its_values_does() -> None:
    model = handoffs("bfloat16")
    int8 = [model.through_the_wire(prompt, "int8") for prompt in model.prompts]
    one_bit = [without_last_bit(prompt.blocks) for prompt in model.prompts]
    of_int8, of_one_bit = (agreement(model.unchanged, model.continue_with(each)) for each in (int8, one_bit))
    print(f"\nbfloat16 without its last bit: {of_one_bit}")
    assert of_int8.continuations > of_one_bit.continuations - 0.1


def test_agreement_counts_decisions_up_to_the_first_different_one() -> None:
    same = Continuation([1] * NEW_TOKENS, [0.5] * NEW_TOKENS)
    other = Continuation([1] * 9 + [2, 1] + [3] * (NEW_TOKENS - 11), [0.1] * NEW_TOKENS)
    agreed = agreement([same, same], [same, other])
    assert agreed.continuations == 0.5
    assert agreed.decisions == 1 - 1 / (NEW_TOKENS + 10)
    assert agreed.margins.tolist() == [0.5]
