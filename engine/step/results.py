"""What the engine returns to the worker's loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv.sequence_blocks import SequenceBlocks
from protocol.outputs import TokenOutput
from protocol.requests import EngineRequest


@dataclass(frozen=True, eq=False)
class Reservation:
    """Room for a prompt that another worker computes. The tokens before `covered` are there, or not needed.

    Whoever reserved it owns it, until `Engine.activate` or until it frees the `sequence_blocks`. The
    request's time limit counts from `since` (monotonic seconds).
    """

    request: EngineRequest
    sequence_blocks: SequenceBlocks
    covered: int
    since: float

    @property
    def first_tokens(self) -> list[int]:
        """Of each table, the first that has yet to come."""
        size = self.sequence_blocks.manager.block_size
        return [max(self.covered, num_left * size) for num_left in self.sequence_blocks.num_left]

    @property
    def num_cached(self) -> int:
        """Those of them that were found. Behind a sliding window of all layers nobody looked."""
        found = self.covered > min(self.sequence_blocks.num_left) * self.sequence_blocks.manager.block_size
        return self.covered if found else 0


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
    """Tokens that were not computed because some tier held their KV."""
    steps: int
