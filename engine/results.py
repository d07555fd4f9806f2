"""What the engine returns to the worker's loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.block_manager import BlockTable
from protocol.messages import EngineRequest, TokenOutput


@dataclass(frozen=True, eq=False)
class Reservation:
    """Blocks for a prompt that another worker computes. The first `cached_blocks` are filled already.

    Whoever reserved them owns them, until `Engine.activate` or until it frees the `table`. The request's time
    limit counts from `since` (monotonic seconds).
    """

    request: EngineRequest
    table: BlockTable
    block_size: int
    cached_blocks: int
    since: float

    @property
    def block_ids(self) -> list[int]:
        return self.table.block_ids


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
