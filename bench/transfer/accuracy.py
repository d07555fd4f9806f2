"""Quantization on the wire: the bytes it saves, and how often greedy decoding continues the same.

The bundled model's own KV of held-out Python code is converted to the wire format and back. A greedy
continuation is a chain of decisions, and the decisions after the first different one say little. So three
things are measured: whole continuations that agree, decisions that agree (up to and including the first
different one), and the margin by which the model preferred its token at a different decision.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from bench.transfer.row import TransferRow
from checkpoints.source import hf_source
from engine.engine import Engine
from kvtransfer.blocks.convert import Converter, Quantizer
from kvtransfer.blocks.layout import block_bytes, tokens_in_blocks
from models.bundled import BUNDLED_FOLDER, BUNDLED_MODEL
from protocol.config import ServeConfig
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

NEW_TOKENS = 64


@dataclass
class Prefilled:
    """A prompt, its blocks as stored in the pool, and the first token after it."""

    token_ids: list[int]
    blocks: bytearray
    first_token: int

    @property
    def positions(self) -> np.ndarray:
        return np.arange(-(-len(self.token_ids) // 16))


@dataclass
class Continuation:
    """Generated tokens, and the margin (in nats) of each over the next most likely token."""

    token_ids: list[int]
    margins: list[float]


class Handoffs:
    """A model, with prompts whose KV is converted to the wire format and back before decoding."""

    def __init__(
        self, dtype: Literal["float32", "bfloat16"], model: str = str(BUNDLED_MODEL), most: int | None = None
    ) -> None:
        disable_progress_bar()
        config = ServeConfig(
            model=model,
            dtype=dtype,
            device="cpu",
            compile="off",
            enable_prefix_caching=False,
            kv_cache_memory_bytes=512 * 1024 * 1024,
            log_level="warning",
        )
        self.engine = Engine(config)
        self.segments = self.engine.pool.segments
        self.pool = memoryview(self.engine.pool.memory.flatten().numpy())
        self.block_bytes = block_bytes(self.segments)
        tokenizer = AutoTokenizer.from_pretrained(hf_source(model))
        lines = (BUNDLED_FOLDER / "heldout_prompts.jsonl").read_text("utf-8").splitlines()[:most]
        prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
        self.prompts = [self.prefill(f"prefill-{index}", ids) for index, ids in enumerate(prompts)]

    @cached_property
    def unchanged(self) -> list[Continuation]:
        return self.continue_with([prompt.blocks for prompt in self.prompts])

    def request(self, request_id: str, token_ids: list[int]) -> EngineRequest:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
        return EngineRequest(request_id=request_id, prompt_token_ids=token_ids, sampling=sampling)

    def prefill(self, request_id: str, token_ids: list[int]) -> Prefilled:
        self.engine.add(self.request(request_id, token_ids), prefill_only=True)
        tokens: list[int] = []
        while not tokens:
            tokens = [token for output in self.engine.step().outputs for token in output.token_ids]
        ids = self.engine.computed(request_id)[0].blocks
        size = self.block_bytes
        blocks = bytearray().join(self.pool[block * size : (block + 1) * size] for block in ids)
        self.engine.abort(request_id)
        return Prefilled(token_ids, blocks, tokens[0])

    def continue_with(self, blocks: list[bytearray]) -> list[Continuation]:
        """Return the greedy continuation of each prompt with the given blocks."""
        continuations: dict[str, Continuation] = {}
        for index, (prompt, content) in enumerate(zip(self.prompts, blocks, strict=True)):
            name = f"decode-{index}"
            reservation = self.engine.reserve(self.request(name, prompt.token_ids))
            assert reservation is not None and reservation.covered == 0
            size = self.block_bytes
            for position, block in enumerate(reservation.sequence_blocks.blocks[0]):
                begin = position * size
                self.pool[block * size : (block + 1) * size] = content[begin : begin + size]
            self.engine.activate(reservation, prompt.first_token, len(prompt.token_ids))
            continuations[name] = Continuation([prompt.first_token], [math.inf])
        while self.engine.has_work():
            for output in self.engine.step().outputs:
                continuations[output.request_id].token_ids.extend(output.token_ids)
                margins = [each.top_logprobs[0] - each.top_logprobs[1] for each in output.logprobs or []]
                continuations[output.request_id].margins.extend(margins)
        return list(continuations.values())

    def through_the_wire(self, prompt: Prefilled, wire_dtype: str) -> bytearray:
        quantizer = Quantizer(self.segments, wire_dtype)
        wire = bytearray(len(prompt.positions) * quantizer.wire_block_bytes)
        num_tokens = tokens_in_blocks(prompt.positions, 16, len(prompt.token_ids))
        quantizer.pack(memoryview(prompt.blocks), prompt.positions, num_tokens, memoryview(wire))
        back = bytearray(len(prompt.blocks))
        converter = Converter(quantizer.wire, self.segments, memoryview(back))
        converter.place(memoryview(wire), prompt.positions, prompt.positions, len(prompt.token_ids))
        return back


@dataclass
class Agreement:
    """Shares of equal whole continuations and of equal decisions; margins at the different decisions."""

    continuations: float
    decisions: float
    margins: np.ndarray


def agreement(reference: list[Continuation], other: list[Continuation]) -> Agreement:
    margins: list[float] = []
    decisions = 0
    for expected, got in zip(reference, other, strict=True):
        assert len(expected.token_ids) == len(expected.margins) == len(got.token_ids) == NEW_TOKENS
        differing = np.flatnonzero(np.array(expected.token_ids) != np.array(got.token_ids))
        decisions += int(differing[0]) + 1 if len(differing) else NEW_TOKENS
        margins.extend(expected.margins[first] for first in differing[:1])
    count = len(reference)
    return Agreement((count - len(margins)) / count, 1 - len(margins) / decisions, np.array(margins))


def int8(repeats: int) -> Iterator[TransferRow]:
    """Measure int8 on the wire once, because every run has the same figures."""
    for dtype in ("bfloat16", "float32"):
        model = Handoffs(dtype)
        if dtype == "bfloat16":
            share = block_bytes(Quantizer(model.segments, "int8").wire) / model.block_bytes
            yield TransferRow(what="int8 on the wire, bytes", value=share, at_most=0.53, baseline="bfloat16")
        blocks = [model.through_the_wire(prompt, "int8") for prompt in model.prompts]
        agreed = agreement(model.unchanged, model.continue_with(blocks))
        yield TransferRow(
            what=f"int8 on the wire, {dtype}: {NEW_TOKENS}-token greedy continuations that agree wholly",
            value=agreed.continuations,
            at_least=0.98,
            ours=f"{len(model.prompts)} prompts",
            baseline="unchanged KV",
        )
        yield TransferRow(
            what=f"int8 on the wire, {dtype}: greedy decisions that agree",
            value=agreed.decisions,
            ours=f"where one differs, the margin was at most {agreed.margins.max(initial=0):.3f} nats",
        )
