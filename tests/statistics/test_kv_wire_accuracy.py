"""What quantization on the wire costs in accuracy, on the bundled model's own KV of held-out Python code.

`pytest tests/statistics/test_kv_wire_accuracy.py -s` prints the figures.
"""

from __future__ import annotations

import json
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


@dataclass
class Prefilled:
    """A prompt, its blocks as they lie in the pool, and the first token after it."""

    token_ids: list[int]
    blocks: bytearray
    first_token: int

    @property
    def positions(self) -> np.ndarray:
        return np.arange(-(-len(self.token_ids) // 16))


class Handoffs:
    """The bundled model, whose prompts' KV goes through the wire's format and back before decoding."""

    def __init__(self) -> None:
        config = ServeConfig(
            model=str(MODEL),
            dtype="bfloat16",
            device="cpu",
            compile="off",
            enable_prefix_caching=False,
            kv_cache_memory_bytes=256 * 1024 * 1024,
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

    def request(self, request_id: str, token_ids: list[int]) -> EngineRequest:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
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

    def continue_with(self, blocks: list[bytearray]) -> list[list[int]]:
        """The greedy continuation of each prompt if these are its blocks."""
        continuations: dict[str, list[int]] = {}
        for index, (prompt, content) in enumerate(zip(self.prompts, blocks, strict=True)):
            name = f"decode-{index}"
            reservation = self.engine.reserve(self.request(name, prompt.token_ids))
            assert reservation is not None and reservation.cached_blocks == 0
            for position, block in enumerate(reservation.block_ids):
                start = position * self.block_bytes
                self.pool[block * self.block_bytes : (block + 1) * self.block_bytes] = content[
                    start : start + self.block_bytes
                ]
            self.engine.activate(name, prompt.first_token)
            continuations[name] = [prompt.first_token]
        while self.engine.has_work():
            for output in self.engine.step().outputs:
                continuations[output.request_id].extend(output.token_ids)
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


@pytest.fixture(scope="module")
def handoffs() -> Handoffs:
    return Handoffs()


@pytest.fixture(scope="module")
def unquantized(handoffs: Handoffs) -> list[list[int]]:
    return handoffs.continue_with([prompt.blocks for prompt in handoffs.prompts])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wire_dtype", "least_agreement", "most_error"), [("int8", 0.98, 0.01), ("fp8", 0.5, 0.04)]
)
def test_greedy_continuations_agree(
    handoffs: Handoffs,
    unquantized: list[list[int]],
    wire_dtype: str,
    least_agreement: float,
    most_error: float,
) -> None:
    blocks = [handoffs.through_the_wire(prompt, wire_dtype) for prompt in handoffs.prompts]
    errors = handoffs.relative_error(blocks)
    continuations = handoffs.continue_with(blocks)
    agreeing = sum(ours == theirs for ours, theirs in zip(continuations, unquantized, strict=True))
    same_tokens = np.mean(np.array(continuations) == np.array(unquantized))
    share = block_bytes(Quantizer(handoffs.segments, wire_dtype).wire) / handoffs.block_bytes
    print(
        f"\n{wire_dtype}: {share:.4f} of the bytes, relative RMS error K {errors[0]:.4f} V {errors[1]:.4f}, "
        f"{agreeing} of {len(unquantized)} continuations of {NEW_TOKENS} tokens agree, "
        f"{same_tokens:.3f} of all tokens"
    )
    assert len(unquantized) >= 50
    assert max(errors) < most_error
    assert agreeing >= least_agreement * len(unquantized)
