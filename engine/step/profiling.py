"""Profiling at start: forwards over made-up sequences on free blocks."""

from __future__ import annotations

from types import TracebackType

from engine.batch.runner import ForwardOutput, Runner
from engine.kv.block_manager import BlockManager
from engine.kv.sequence_blocks import SequenceBlocks
from engine.step.packing import pack
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceStage, SequenceState
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

_PHRASE = 7
"""Period of the made-up text, in tokens: every drafting method finds repetition in it."""
_TENANT = "\0profiling"
"""Cache salt: what drafters learn from the made-up text is never used for requests."""


class ProfilingRun:
    """A context manager: on exit all its blocks are free again. It publishes nothing to the prefix cache."""

    def __init__(self, blocks: BlockManager, runner: Runner, max_model_len: int) -> None:
        self._blocks = blocks
        self._runner = runner
        self.max_model_len = max_model_len
        self._sequences: list[SequenceState] = []

    def __enter__(self) -> ProfilingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()

    def sequences(self, count: int, num_tokens: int, room: int) -> list[SequenceState] | None:
        """`count` sequences of `num_tokens` uncomputed tokens, with blocks for `room` more. None if they do
        not fit. Frees those of the call before.
        """
        self.free()
        if num_tokens + room > self.max_model_len:
            return None
        for index in range(count):
            sequence = _made_up(index, num_tokens)
            sequence.sequence_blocks = SequenceBlocks(self._blocks, root=b"")
            self._sequences.append(sequence)
            if not sequence.held.grow(0, num_tokens + room):
                self.free()
                return None
        return list(self._sequences)

    def forward(self, sequences: list[SequenceState], *, wants_hidden: bool = True) -> ForwardOutput:
        """Run all uncomputed tokens and the drafts; logits for the last token and each drafted one."""
        packed = pack(ScheduledStep(sequences, [sequence.num_uncomputed for sequence in sequences]))
        return self._runner.run(packed.step(wants_hidden=wants_hidden))

    def free(self) -> None:
        for sequence in reversed(self._sequences):
            sequence.held.free()
        self._sequences = []


def _made_up(index: int, num_tokens: int) -> SequenceState:
    request = EngineRequest(
        request_id=f"profiling-{index}",
        prompt_token_ids=[1 + place % _PHRASE for place in range(num_tokens - 1)],
        output_token_ids=[1 + (num_tokens - 1) % _PHRASE],
        cache_salt=_TENANT,
        sampling=SamplingParams(max_tokens=1 << 20, temperature=0.0, ignore_eos=True),
    )
    return SequenceState(request, order=index, stage=SequenceStage.RUNNING, state_slot=index)
