"""Records that the engine returns to the worker's loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv.sequence_blocks import SequenceBlocks
from protocol.handoff import Extent
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest


@dataclass(frozen=True, eq=False)
class Reservation:
    """Blocks for a prompt that another worker computes. KV before token `covered` is here or not needed.

    The caller of `Engine.reserve` owns the reservation until it calls `Engine.activate` or frees
    `sequence_blocks`. The request's time limit counts from `since` (monotonic seconds).
    """

    request: EngineRequest
    sequence_blocks: SequenceBlocks
    covered: int
    since: float

    @property
    def extents(self) -> list[Extent]:
        """The blocks for the tokens and the state, as other workers address them."""
        num_tokens = len(self.request.prompt_token_ids) + len(self.request.output_token_ids)
        return self.sequence_blocks.extents(-(-num_tokens // self.sequence_blocks.manager.block_size))

    @property
    def first_tokens(self) -> list[int]:
        """The first token whose block must still arrive, for each block table."""
        size = self.sequence_blocks.manager.block_size
        return [max(self.covered, place * size) for place in self.sequence_blocks.first_places]

    @property
    def num_cached(self) -> int:
        """Number of tokens found in the cache; 0 if the covered tokens all precede the sliding windows."""
        before_windows = min(self.sequence_blocks.first_places) * self.sequence_blocks.manager.block_size
        return self.covered if self.covered > before_windows else 0


@dataclass
class StepResult:
    outputs: list[TokenOutput] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(frozen=True)
class EngineStats:
    num_running: int
    num_waiting: int
    waiting_tokens: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    """Number of tokens that were not computed because some tier held their KV."""
    steps: int
