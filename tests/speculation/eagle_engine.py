"""Runs an engine with a head, records its drafts, and corrects them if a test wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.cpu.decoder.forward import NativeDecoder
from engine.devices.torch.program import ProgramForward, TorchProgram
from engine.devices.torch.runner import TorchRunner
from engine.engine import Engine
from engine.model.program import ModelProgram
from engine.step.draft import Draft
from protocol.config import ServeConfig
from protocol.handoff import DraftState
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import Method, Quantization, SpeculativeConfig, Verification
from speculation.speculator import BatchSpeculator


class Watched:
    """Records `drafts`: the committed tokens, and the tokens drafted after them.

    With `correct` the engine gets other drafts: after n tokens the first `correct(n)` tokens equal those of
    `answers[request id]` (prompt and continuation) and the rest is wrong. `quantization` is the head's.
    """

    def __init__(
        self,
        target: Path,
        head: Path,
        num_tokens: int = 4,
        tree_nodes: int = 0,
        verification: Verification = "coupled",
        quantization: Quantization | None = None,
        method: Method = "eagle",
        **options: Any,
    ) -> None:
        self.drafts: list[tuple[str, list[int], list[int]]] = []
        self.trees: list[Draft] = []
        self.answers: dict[str, list[int]] = {}
        self.correct: Callable[[int], int] | None = None
        speculative = SpeculativeConfig(
            method=method,
            model=str(head),
            num_speculative_tokens=tree_nodes or num_tokens,
            max_speculative_tokens=max(1, num_tokens),
            tree=tree_nodes > 0,
            verification=verification,
            tree_nodes=max(1, tree_nodes),
            quantization=quantization,
        )
        config = ServeConfig(
            model=str(target),
            dtype="float32",
            device="cpu",
            compile="off",
            max_num_batched_tokens=24,
            max_num_seqs=8,
            block_size=8,
            kv_cache_memory_bytes=4_000_000,
            speculative_config=speculative,
        )
        self.engine = Engine(replace(config, **options), speculate=BatchSpeculator)
        speculator = self.engine._speculator
        assert isinstance(speculator, BatchSpeculator)
        self.target = speculator._loaded
        drafter: Any = speculator._drafters[method]
        self.drafter = drafter
        if drafter.kv_group is not None:
            self.engine.pool.segment("draft").fill_(1e3)  # unwritten KV must never be read
        self._propose = drafter.propose
        drafter.propose = self.propose

    def propose(self, sequences: Sequence[Any], counts: Sequence[int]) -> list[Draft | None]:
        drafts = self._propose(sequences, counts)
        for index, (sequence, draft) in enumerate(zip(sequences, drafts, strict=True)):
            if draft is None:
                assert self.drafter.kv_group is None, "only a last hidden state may be unknown"
                continue
            assert 0 < len(draft.token_ids) <= counts[index]
            self.trees.append(draft)
            self.drafts.append((sequence.request_id, list(sequence.token_ids), draft.token_ids))
            if self.correct is not None:
                drafts[index] = Draft(self._corrected(sequence, counts[index]))
        return drafts

    def _corrected(self, sequence: Any, count: int) -> list[int]:
        assert self.correct is not None
        length = len(sequence.token_ids)
        truth = self.answers[sequence.request_id][length : length + count]
        right = self.correct(length)
        return [token if place < right else token ^ 1 for place, token in enumerate(truth)]

    def ask(self, request_id: str, prompt: list[int], max_tokens: int = 16, **fields: Any) -> None:
        sampling = {"temperature": 0.0, "ignore_eos": True} | fields.pop("sampling", {})
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        request = EngineRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params)
        self.engine.add(request, **fields)

    def run(self) -> dict[str, list[int]]:
        """Run until all requests end. Return each request's output."""
        outputs: dict[str, list[int]] = {}
        while self.engine.has_work():
            for output in self.engine.step().outputs:
                assert output.finish_reason != "error", output.error
                outputs.setdefault(output.request_id, []).extend(output.token_ids)
        return outputs

    def assert_drafts(self, draft: Callable[[list[int], int], list[int]]) -> None:
        """Compare all drafts with what `draft` makes of the committed tokens and a number of tokens."""
        assert self.drafts
        for request_id, token_ids, drafted in self.drafts:
            assert drafted == draft(token_ids, len(drafted)), f"{request_id} after {len(token_ids)} tokens"

    def hand_over(
        self, decode: Watched, prompt: list[int], max_tokens: int, uncomputed: int = 0
    ) -> tuple[list[int], DraftState]:
        """Compute a prompt and let another engine decode. Return the first token, and the drafter's state,
        which is useless to an engine that has to compute `uncomputed` tokens again.
        """
        self.ask("a", prompt, max_tokens, prefill_only=True)
        first = self.run_steps(4)["a"]
        reservation = decode.engine.reserve(self.engine.sequences["a"].request)
        assert reservation is not None
        blocks = zip(reservation.sequence_blocks.blocks, self.engine.computed("a"), strict=True)
        for target, source in blocks:
            decode.engine.pool.memory[target] = self.engine.pool.memory[source.blocks]
        state = self.engine.draft_state("a")
        given = msgspec.structs.replace(state, feature=b"\xff" * len(state.feature)) if uncomputed else state
        decode.engine.activate(reservation, first[0], len(prompt) - uncomputed, draft=given)
        return first, state

    @staticmethod
    def rows(token_ids: list[int], start: int, block_ids: list[int]) -> SequenceRows:
        return SequenceRows(token_ids, start, [block_ids], first_key=1)

    def run_steps(self, count: int) -> dict[str, list[int]]:
        outputs: dict[str, list[int]] = {}
        for _ in range(count):
            for output in self.engine.step().outputs:
                outputs.setdefault(output.request_id, []).extend(output.token_ids)
        return outputs

    def assert_native_rows(self, program: ModelProgram, width: int, tolerance: float) -> None:
        """Compare the native head's rows with those of its `program` by torch's operators."""
        native = self.drafter._runner
        assert isinstance(native, NativeDecoder)
        forward = ProgramForward(TorchProgram(program, 64), native._backend)
        plain = TorchRunner(forward, native._backend, torch.device("cpu"), "off", products="")
        outputs = []
        for runner in (native, plain):
            self.engine.pool.segment("draft").zero_()
            random = torch.Generator().manual_seed(3)
            parts = []
            for start, count in ((1, 9), (10, 1), (11, 3)):
                hidden = torch.randn(count, width, generator=random).to(self.target.dtype)
                token_ids = torch.randint(1, self.target.vocab_size, (count,), generator=random).tolist()
                rows = [self.rows(token_ids, start, [4, 2, 7])]
                parts.append(runner.run(Step(rows, range(count), hidden=hidden)))
            outputs.append(parts)
        for ours, theirs in zip(*outputs, strict=True):
            for mine, other in ((ours.logits, theirs.logits), (ours.hidden, theirs.hidden)):
                assert mine is not None and other is not None
                assert (mine - other).abs().max() <= tolerance * other.abs().max()
